"""Pick a draft model for a target from configurations and tokenizers; weights are never looked at.

The order: what the user gave; what the target's configuration names (`assistant_model`, in `config.json` or in
`generation_config.json`); trained heads that the catalog knows; whole checkpoints in the local cache; the catalog's
families; the target's author on the Hub. Of each, the best by predicted speed-up whose token ids are the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from ..engine.tokens import Vocabulary
from ..errors import SpecDecError
from . import hub as real_hub
from . import remembered, sources
from .asking import HubProblem
from .candidates import Candidate, Choice, Repository
from .catalog import DRAFT_KINDS, RUNNABLE_HEADS, Catalog, kind_of, load_catalog
from .facts import bytes_of, decoder_config, facts_of, quantised_bits
from .ranking import ROUND, Prediction, cannot_pay, memory_bytes, predict
from .sources import Option, Target
from .vocabulary import compare


FITS = {"same": "fits", "same-with-padding": "fits with padding"}
RANKS = {"fits": 0, "fits with padding": 0, "unverified": 1, "other vocabulary": 2, "rejected": 3}
UNREACHABLE = ("offline", "network", "server")
MOST_VERIFIED = 6  # candidates of one source whose files are looked at
MOST_SILENCES = 2  # questions without an answer, before the Hub is let alone
BETTER = 1.1  # a draft that isn't here is worth a word when it promises this much more


def pick(
    target: str,
    *,
    given: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    refresh: bool = False,
    free_bytes: int | None = None,
    overhead: float = ROUND,
    quantization_config: Any = None,
    hub: ModuleType | Any = real_hub,
) -> Choice:
    """Pick a draft model.

    Args:
        target: Hub id or local folder.
        given: The user's own wish: an id or a folder, looked at first.
        revision: The target's branch, tag or commit.
        token: Token of the Hub.
        local_files_only: Ask the local cache alone. Drafts that would have to be downloaded stay unverified.
        refresh: Forget the earlier pick for this target.
        free_bytes: Memory for the draft and its cache on its device; larger ones are rejected.
        overhead: What a round costs besides its forwards, in target steps (`ranking.predict`).
        quantization_config: How the target is quantised while it is loaded; a saved quantisation is known.
        hub: What answers in the place of `selection.hub`.

    Returns:
        The choice. `chosen.verified` is false where configuration and token ids could not be compared.

    Raises:
        SpecDecError: If the target isn't there, or is no causal language model.
    """
    catalog, notes, repository = load_catalog(), [], None
    asking = {"token": token, "local_files_only": local_files_only}
    try:
        repository = hub.describe(target, revision=revision, **asking)
    except HubProblem as problem:
        if problem.kind in ("missing", "unusable", "disk") and catalog.member(target) is None:
            if problem.kind == "missing" and (near := _near(target, catalog)):
                raise HubProblem("missing", f"{problem} Did you mean {near}?") from problem
            raise
        notes.append(f"unverified, because the target's files can't be read: {problem}")
    known = Target.of(target, repository, _tokenizer(target, repository, asking, hub), catalog)
    if known is None:
        near = _near(target, catalog)
        notes.append(f"the catalog doesn't know {target}" + (f"; did you mean {near}?" if near else ""))
        return Choice(target, None, (), tuple(notes))
    if quantization_config is not None:
        known = replace(known, facts=replace(known.facts, bits=quantised_bits(quantization_config)))
    entry = None
    if repository is not None and given is None:
        local = local_files_only or hub.is_offline()
        where = f"cache {remembered.cache_state()}" if local else "hub"
        bits = known.facts.bits
        entry = remembered.key(
            repository, f"{where}, {overhead:g} a round, {f'{bits:g} bits' if bits else 'unpacked'}"
        )
        if not refresh and (choice := _recalled(entry, free_bytes, hub)):
            return choice
    search = _Search(known, asking, free_bytes, overhead, hub, notes)
    choice = search.run(given)
    chosen = choice.chosen
    # another time there may be room for a better one
    cramped = chosen is not None and any(each.speedup > _gain(chosen) for each in search.no_room)
    if entry is not None and chosen is not None and chosen.verified and not cramped:
        remembered.remember(entry, choice)
    return choice


class _Search:
    """One search for the draft of one target."""

    def __init__(
        self, target: Target, asking: dict[str, Any], free: int | None, overhead: float, hub: Any, notes: list[str]
    ) -> None:
        self.target, self.asking, self.free, self.overhead = target, asking, free, overhead
        self.hub, self.notes, self.catalog = hub, notes, load_catalog()
        self.found: dict[str, Candidate] = {}
        self.silences = 0
        self.no_room: list[Prediction] = []
        self.chosen: Candidate | None = None
        self.vocabulary: Vocabulary | str | None = None

    def run(self, given: str | None) -> Choice:
        """Look through the sources until a draft fits."""
        target, catalog = self.target, self.catalog
        if given is not None:
            self._look([Option(given, "given")])
        self._look(sources.saved(target))
        self._look(sources.heads(target, catalog))
        self._look(sources.cached(target, catalog, self.hub))
        self._look(sources.members(target, catalog, own=True))
        if not self._usable():
            self._look(sources.members(target, catalog, own=False))
        silent = catalog.member(target.id) is None and not self._usable()
        if silent and not (self.asking["local_files_only"] or self.hub.is_offline()):
            try:
                self._look(sources.searched(target, catalog, self.hub, self.asking["token"]))
            except HubProblem as problem:
                self.notes.append(f"the Hub was not searched: {problem}")
        self.chosen = self.chosen or self._next_best()
        self._note()
        ranked = sorted(self.found.values(), key=_order(self.chosen))
        return Choice(target.id, self.chosen, tuple(ranked), tuple(self.notes))

    def _usable(self) -> bool:
        models = [each for each in self.found.values() if each.kind == "draft_model"]
        return any(each.verdict in ("fits", "fits with padding", "unverified") for each in models)

    def _look(self, options: Iterable[Option]) -> None:
        """Judge the candidates of one source, the most promising first; look at their files until one fits."""
        new = {option.id: option for option in options if option.id not in self.found}
        judged = [(self._judge(option), option) for option in new.values()]
        judged.sort(key=lambda pair: (-round(_gain(pair[0]), 2), -_alike(self.target.id, pair[1].id)))
        looked = 0
        for candidate, option in judged:
            if candidate.verdict == "unverified" and self.chosen is None and looked < MOST_VERIFIED:
                looked += 1
                candidate = self._verify(option)
                if candidate.verdict in FITS.values():
                    self.chosen = candidate
            self.found[option.id] = candidate

    def _judge(self, option: Option) -> Candidate:
        """What can be said by kind and sizes alone."""
        candidate = Candidate(option.id, "draft_model", "unverified", source=option.source)
        if option.kind is not None and option.kind not in DRAFT_KINDS:
            reasons = (
                () if option.kind in RUNNABLE_HEADS else (f"not yet runnable here: a trained head ({option.kind})",)
            )
            return replace(
                candidate, kind=option.kind, verdict="rejected" if reasons else "unverified", reasons=reasons
            )
        if option.repository is not None and option.repository.problem:
            return replace(candidate, verdict="rejected", reasons=(option.repository.problem,))
        if option.facts is None:
            return candidate
        reason, prediction = self._weigh(option)
        if self.target.is_recurrent:
            reason = "the target has recurrent layers, whose state can't be rolled back yet: it decodes plainly"
        repository = option.repository
        size = option.facts.parameters * bytes_of(option.facts.dtype)
        if repository is not None:
            size = 0 if repository.complete else repository.weights_bytes or size
        needed = memory_bytes(option.facts, dtype=self.target.facts.dtype)
        if option.source == "given":  # the user's word counts for more than a prediction
            reason = None
        if reason is None and self.free is not None and needed > self.free:
            self.no_room.append(prediction)
            reason = f"needs {needed / 1e9:.2f} GB with its cache, {self.free / 1e9:.2f} GB are free"
        gain = (
            f"{prediction.num_draft_tokens} draft tokens a round, each at {prediction.acceptance:.0%} acceptance and "
            f"{prediction.cost:.2f} of a target step"
        )
        return replace(
            candidate,
            verdict="unverified" if reason is None else "rejected",
            reasons=(reason or gain,),
            revision=repository.revision if repository else None,
            memory_bytes=needed,
            download_bytes=size,
            predicted_speedup=round(prediction.speedup, 3),
        )

    def _weigh(self, option: Option) -> tuple[str | None, Prediction]:
        """Why kind or sizes speak against a draft, and what it would gain."""
        target, facts = self.target, option.facts
        assert facts is not None
        kinds = DRAFT_KINDS.get(target.kind or "", tuple(DRAFT_KINDS))
        member = self.catalog.member(option.id)
        related = member is None or target.family is None or member.family == target.family.name
        same = target.kind is None or option.kind == kinds[0]
        measured = self.catalog.acceptance.get((target.id, option.id))
        gain = predict(target.facts, facts, acceptance=measured, same_kind=same and related, overhead=self.overhead)
        if option.kind is not None and option.kind not in kinds:
            return f"of another kind: {option.kind}, and the target is {target.kind}", gain
        return cannot_pay(target.facts, facts, gain), gain

    def _verify(self, option: Option) -> Candidate:
        """Compare configuration and token ids, as far as the files can be had."""
        candidate = self._judge(option)
        if self.target.repository is None:
            return candidate
        try:
            repository: Repository = option.repository or self.hub.describe(option.id, **self.asking)
            if reason := self.hub.excluded_reason(repository):
                return replace(candidate, verdict="rejected", reasons=(reason,))
            option = replace(option, repository=repository, facts=facts_of(repository))
            candidate = self._judge(option)
            if candidate.verdict == "rejected":
                return candidate
            folder = self.hub.tokenizer_folder(repository, **self.asking)
            if option.kind is None and option.source not in ("given", "config"):  # else somebody knows it
                candidate = self._judge(replace(option, kind=kind_of(option.id, sources.talks(folder))))
                if candidate.verdict == "rejected":
                    return candidate
            ours, theirs = self._own_vocabulary(), _vocabulary(repository, folder)
        except HubProblem as problem:
            self._count_silence(problem)
            verdict = "unverified" if problem.kind in UNREACHABLE else "rejected"
            return replace(candidate, verdict=verdict, reasons=(*candidate.reasons, str(problem)))
        except SpecDecError as error:
            return replace(candidate, verdict="rejected", reasons=(str(error),))
        if isinstance(ours, str) or isinstance(theirs, str):
            missing = ours if isinstance(ours, str) else str(theirs)
            return replace(candidate, reasons=(*candidate.reasons, missing))
        compared = compare(ours, theirs)
        verdict = FITS.get(compared.verdict) or ("fits with padding" if compared.fits else "other vocabulary")
        notes = () if verdict == "fits" else compared.reasons
        return replace(candidate, verdict=verdict, reasons=(*candidate.reasons, *notes), verified=True)

    def _own_vocabulary(self) -> Vocabulary | str:
        """The target's ids, read once, or why they aren't known."""
        if self.vocabulary is None:
            repository = self.target.repository
            assert repository is not None
            try:
                self.vocabulary = _vocabulary(repository, self.hub.tokenizer_folder(repository, **self.asking))
            except HubProblem:
                raise
            except SpecDecError as error:
                self.vocabulary = str(error)
        return self.vocabulary

    def _count_silence(self, problem: HubProblem) -> None:
        """Ask a Hub that doesn't answer a few times, not once a candidate: every question waits for its limit."""
        self.silences += problem.kind == "network"
        if self.silences == MOST_SILENCES and not self.asking["local_files_only"]:
            self.asking = {**self.asking, "local_files_only": True}
            self.notes.append(f"the Hub doesn't answer, so it isn't asked any further: {problem}")

    def _next_best(self) -> Candidate | None:
        """Where none fits for sure: the most promising unseen one, else what the user wanted anyway."""
        models = [each for each in self.found.values() if each.kind == "draft_model"]
        if unseen := [each for each in models if each.verdict == "unverified"]:
            return max(unseen, key=lambda each: (each.source == "given", _gain(each), _alike(self.target.id, each.id)))
        return next((each for each in models if each.source == "given" and each.verdict == "other vocabulary"), None)

    def _note(self) -> None:
        """What the user should know besides."""
        chosen = self.chosen
        if chosen is not None and chosen.verified and chosen.source != "given":
            best = max(
                (each for each in self.found.values() if each.verdict == "unverified"), key=_gain, default=chosen
            )
            if _gain(best) > BETTER * _gain(chosen):
                size = (best.download_bytes or 0) / 1e9
                self.notes.append(f"{best.id}, a download of {size:.2f} GB, promises {_gain(best):.2f}×")


def _near(target: str, catalog: Catalog) -> str | None:
    """The id in the catalog that a misspelt one may mean."""
    return next(iter(get_close_matches(target, [each.id for each in catalog.members()], n=1, cutoff=0.8)), None)


def _tokenizer(target: str, repository: Repository | None, asking: dict[str, Any], hub: Any) -> Path | None:
    """The folder of the target's tokenizer, where its name alone doesn't say whether it is a chat model."""
    if repository is None or kind_of(target) is not None or load_catalog().member(target) is not None:
        return None
    try:
        folder: Path | None = hub.tokenizer_folder(repository, **asking)
    except HubProblem:
        return repository.folder
    return folder


def _vocabulary(repository: Repository, folder: Path | None) -> Vocabulary | str:
    """The ids of a checkpoint, or why it has none.

    Raises:
        SpecDecError: If its files can't be read.
    """
    if folder is None:
        return f"{repository.id} has no tokenizer, so ids can't be compared"
    try:
        return Vocabulary.load(folder, getattr(decoder_config(repository.config), "vocab_size", None))
    except Exception as error:  # tokenizers raises bare exceptions
        raise SpecDecError(f"the tokenizer of {repository.id} can't be read: {error}") from error


def _recalled(entry: str, free: int | None, hub: Any) -> Choice | None:
    """An earlier pick, if the draft is still where it was and has room."""
    known = remembered.recall(entry)
    if known is None or known.chosen is None:
        return None
    chosen = known.chosen
    try:
        here = hub.describe(chosen.id, revision=chosen.revision, local_files_only=True).complete
    except HubProblem:
        here = False
    if (chosen.download_bytes == 0 and not here) or (free is not None and (chosen.memory_bytes or 0) > free):
        return None
    now = replace(chosen, download_bytes=0 if here else chosen.download_bytes)
    return replace(known, chosen=now, candidates=(now, *known.candidates[1:]))


def _order(chosen: Candidate | None) -> Callable[[Candidate], tuple[Any, ...]]:
    """The chosen one first, the rejected ones last, the more promising before the others."""
    return lambda each: (each != chosen, RANKS[each.verdict], each.kind != "draft_model", -_gain(each), each.id)


def _gain(candidate: Candidate) -> float:
    return candidate.predicted_speedup or 0.0


def _alike(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()
