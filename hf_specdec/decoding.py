"""The loop: prefill, then propose → verify → commit → report, round after round.

One token from `generate` to the output: `hook` routes the call to `decode`; the target reads the prompt (`_prefill`);
a drafter guesses what follows (`Proposer.propose`); the target reads all guesses in one forward and the sampler keeps a
prefix (`_verify`); the rows, the caches and the drafter hear what was kept (`_emit`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from .config import SpecConfig
from .drafters.base import Draft, DraftContext, Drafter
from .engine import compat
from .engine.cache import upload
from .engine.clock import Clock
from .engine.costs import measure
from .engine.fast import tally
from .engine.forward import RowModel
from .engine.handover import Handover
from .engine.length import AdaptiveLength, Round
from .engine.logits import BlockLogits
from .engine.ranks import ALONE, Ranks
from .engine.records import Records
from .engine.rows import Rows
from .engine.sampling import HostDecision, Sampler
from .engine.stopping import Stopper
from .engine.streaming import Stream
from .engine.tree import Tree, depths
from .outputs import SpecOutput
from .proposing import Proposer, name_of
from .stats import RowStats, SpecStats, StepEvent


logger = logging.getLogger(__name__)

# logits of all prompt tokens, for drafters that learn from them: the output layer's share of the parameters, and numbers
MOST_HEAD_SHARE, MOST_PROMPT_LOGITS = 0.125, 1 << 27


@dataclass(frozen=True, slots=True)
class Call:
    """What `generate` has prepared for its decoding loop."""

    input_ids: Tensor
    logits_processor: Sequence[Any]
    stopping_criteria: Sequence[Any]
    generation_config: Any
    streamer: Any
    attention_mask: Tensor | None
    cache: Any
    ranks: Ranks = ALONE


class Verified(NamedTuple):
    """What a verification gave, one entry a live row.

    Attributes:
        drafted: Draft tokens verified.
        accepted: How many of them were accepted.
        guesses: The draft tokens, dummies behind them.
        tried: Positions that had a draft token with all predecessors accepted.
        width: Tokens a row in the target's forward.
        decided: The clock's mark when all of this was known.
    """

    drafted: list[int]
    accepted: list[int]
    guesses: list[list[int]]
    tried: list[int]
    width: int
    decided: Any


class Generation:
    """One speculative generation of a batch."""

    def __init__(self, model: Any, call: Call, config: SpecConfig, drafter: Drafter | None) -> None:
        self.model, self.call, self.config = model, call, config
        self.settings, self.ranks = call.generation_config, call.ranks
        criteria = call.stopping_criteria
        keep = None if call.attention_mask is None else call.attention_mask[:, -call.input_ids.shape[1] :].bool()
        ends = [int(token) for each in criteria if isinstance(each, EosTokenCriteria) for token in each.eos_token_id]
        lengths = [each.max_length for each in criteria if isinstance(each, MaxLengthCriteria)]
        max_new = min([*lengths, self.settings.max_length]) - call.input_ids.shape[1]
        pad = self.settings._pad_token_tensor
        self.rows = Rows(call.input_ids, keep, max(max_new, 1), int(pad) if pad is not None else (ends or [0])[0])
        self.stopper = Stopper(criteria, ends, self.ranks)
        self.logits = BlockLogits(call.logits_processor)
        longest = max(map(len, self.rows.texts)) + config.max_draft_tokens
        reserve, most = longest + min(self.rows.max_new_tokens, 256), longest + self.rows.max_new_tokens
        self.target = RowModel(model, len(self.rows.texts), reserve, config.compile, most, self.ranks)
        real = torch.ones(call.input_ids.shape, device="cpu") if keep is None else keep.cpu()
        places = [row.nonzero()[:, 0] for row in real]
        self.records = Records(self.settings, places, self.rows.padded_prompt, compat.layer_windows(model))
        self.sampler = Sampler(
            bool(self.settings.do_sample), config.verification, config.seed, self.rows, call.input_ids.device
        )
        self.proposer = Proposer(model, config, drafter, self.rows, self.ranks)
        self.clock = Clock(call.input_ids.device)
        self.stats = SpecStats(drafter=name_of(drafter), rows=[RowStats() for _ in self.rows.texts])
        self.stats.lean_forward = self.target.lean is not None
        self.stream = Stream(call.streamer, self.rows)
        self.trees = not (self.logits.needs_prefix or self.records.keeps_anything)
        returned = bool(self.settings.return_dict_in_generate)
        self.handover = Handover(self.target, self.rows, call.cache, call.attention_mask, returned)

    def run(self) -> Tensor | SpecOutput:
        """Generate until every row has stopped."""
        began, before = time.perf_counter(), tally()
        self._prefill()
        self._measure_costs()
        while self.rows.live:
            self._round()
        self.stream.end()
        self.stats.total_seconds = time.perf_counter() - began
        self.stats.graph_replays, self.stats.compiled_forwards, self.stats.capture_seconds = tally().since(before)
        self.stats.eager_reason = None if self.target.fast is None else self.target.fast.reason
        return self._output()

    def _prefill(self) -> None:
        """Read the prompts and choose every row's first token."""
        began = time.perf_counter()
        chunk = getattr(self.settings, "prefill_chunk_size", None)
        length, mask = self.call.input_ids.shape[1], self.call.attention_mask
        seen = mask.shape[1] if mask is not None else getattr(self.settings, "_mask_length", length)
        new = self.handover.take_over(seen)
        number = self.ranks.same(self._prompt_successors(len(new) * max(map(len, new))))
        read = self.target.prefill(new, chunk, number, **self.records.options)
        self.records.keep_prefill(read.output, [len(text) for text in new])
        logits = read.logits[:, None].to(self.call.input_ids.device)
        scores = self.logits(logits, self.rows, [0] * len(self.rows.live))
        none = torch.zeros(len(self.rows.live), 0, dtype=torch.long, device=scores.device)
        decision = self.sampler.decide(scores, none, none.sum(-1), None, self.rows)
        decision, _ = decision.shared(self.ranks, none.sum(-1))
        tokens = decision.following.tolist()
        self._start_drafter(scores)
        if read.successors is not None:
            self.proposer.tell("prime", new, read.successors.tolist())
        lengths = list(self.target.cache.lengths)
        self._emit([[token] for token in tokens], scores, logits, None, lengths)
        self.stats.num_target_forwards += 1
        self.stats.prefill_seconds = time.perf_counter() - began
        for row in range(len(tokens)):
            self.stats.record_emitted(row, 1)
        first = [[token] for token in tokens]
        rows, seconds = list(range(len(tokens))), self.stats.prefill_seconds
        self._report(0, rows, [[]] * len(tokens), [0] * len(tokens), first, ["none"] * len(tokens), seconds)

    def _measure_costs(self) -> None:
        """Learn what forwards cost, if this generation is long enough to pay for it and no other rank waits for it."""
        length = self.proposer.length
        drafts = self.proposer.drafter is not None and self.rows.live and self.ranks.alone
        if isinstance(length, AdaptiveLength) and drafts:
            most = min(self.config.max_draft_tokens, self.rows.draft_room()) + 1
            try:
                self.stats.calibration_seconds = measure(self.target, length.verify, most, self.rows.max_new_tokens)
            except Exception as error:  # out of memory, say, which the generation itself may not need
                logger.info("what forwards cost is learnt from the rounds alone: %s: %s", type(error).__name__, error)

    def _round(self) -> None:
        """Draft, verify, commit, report."""
        began = self.clock.mark()
        draft = self.proposer.propose()
        drafted_by = self.clock.mark()
        rows, step = list(self.rows.live), self.stats.num_target_forwards
        outlook = self.proposer.outlook
        drafted, accepted, guesses, tried, width, verified_by = self._verify(draft)
        draft_seconds = self.clock.between(began, drafted_by)
        verify_seconds = self.clock.between(drafted_by, verified_by)
        self.stats.draft_seconds += draft_seconds
        self.stats.verify_seconds += verify_seconds
        emitted = [self.rows.texts[row][-count:] for row, count in zip(rows, self.last_counts, strict=True)]
        counted = draft_seconds if width > 1 and draft.steady else 0.0
        seen = Round(outlook, drafted, tried, accepted, width, verify_seconds, counted)
        self.proposer.observe(seen, emitted, rows)
        named = draft.sources or [self.stats.drafter] * len(rows)
        sources = [name if count else "none" for name, count in zip(named, drafted, strict=True)]
        for index, (row, new) in enumerate(zip(rows, emitted, strict=True)):
            kept = min(accepted[index], len(new))
            self.stats.record_row(row, sources[index], drafted[index], kept, len(new), tried[index])
        guesses = [guess[:count] for guess, count in zip(guesses, drafted, strict=True)]
        self._report(step, rows, guesses, accepted, emitted, sources, draft_seconds + verify_seconds)

    def _verify(self, draft: Draft) -> Verified:
        """One target forward over every row's draft; keep what the sampler accepts."""
        rows, device = self.rows, self.call.input_ids.device
        host_counts = self._fitting(draft)
        width = max(host_counts)
        tokens = draft.tokens[:, :width].to(device)  # a draft of nothing isn't there yet
        probs = None if draft.probs is None else draft.probs[:, :width]
        tokens, counts = self._sound(tokens, upload(host_counts, device), probs)
        last = upload([rows.texts[row][-1] for row in rows.live], device)
        block = torch.cat([last[:, None], tokens], dim=1).to(self.target.device)
        lengths = list(self.target.cache.lengths)
        parents = draft.parents and [row[:count] for row, count in zip(draft.parents, host_counts, strict=True)]
        tree = Tree(parents, self.target.device) if parents and width else None
        output = self.target.forward(block, [count + 1 for count in host_counts], tree=tree, **self.records.options)
        self.stats.num_target_forwards += 1
        logits = compat.all_token_logits(output).to(device)
        if self.logits.needs_prefix and width:
            rows.lay_draft(tokens)
        scores = self.logits(logits, rows, host_counts)
        if self.logits.impure:
            self.proposer.drop(f"the logits processor {self.logits.impure} keeps state between calls")
            counts = torch.zeros_like(counts)
        decision = self.sampler.decide(scores, tokens, counts, probs, rows, tree and tree.to(device))
        decision, counts = decision.shared(self.ranks, counts)
        top = self._successors(logits)
        known = decision.to_host(counts, tokens, draft.healthy, top)
        decided = self.clock.mark()
        if not known.healthy:
            self.proposer.drop(f"the drafter {self.proposer.name!r} gave NaN logits")
        self.stats.add_overlaps(known.overlaps)
        accepted, tried = known.accepted, _tried(known, parents)
        emitted = [
            [guess[at - 1] for at in path] + [token]
            for guess, path, token in zip(known.guesses, known.paths, known.following, strict=True)
        ]
        if self.logits.has_custom:
            # a custom processor may start to keep state at any time; then all rows must be at the same step
            shortest = min(map(len, emitted))
            # what a longer row would have gone on to say was neither accepted nor rejected
            tried = [min(places, shortest - (len(new) > shortest)) for places, new in zip(tried, emitted, strict=True)]
            emitted, accepted = [new[:shortest] for new in emitted], [min(kept, shortest - 1) for kept in accepted]
        self.target.cache.compact(known.paths)
        if top is not None:
            firsts = [rows.texts[row][-1] for row in rows.live]
            blocks = [
                [first, *guess[:count]]
                for first, guess, count in zip(firsts, known.guesses, known.drafted, strict=True)
            ]
            self.proposer.tell("learn", blocks, known.successors, emitted)
        self._emit(emitted, scores, logits, output, lengths, accepted)
        return Verified(known.drafted, accepted, known.guesses, tried, width + 1, decided)

    def _prompt_successors(self, tokens: int) -> int:
        """How many successors of every prompt token to ask for: none where the output layer would make the prefill dear.

        Args:
            tokens: Tokens of the prefill, padding included.
        """
        layer = self.model.get_output_embeddings()
        if layer is None or not self.proposer.num_successors:
            return 0
        small = layer.weight.numel() <= MOST_HEAD_SHARE * self.model.num_parameters()
        return self.proposer.num_successors if small and layer.weight.shape[0] * tokens <= MOST_PROMPT_LOGITS else 0

    def _successors(self, logits: Tensor) -> Tensor | None:
        """The target's most likely tokens at every position, if the drafter learns from them."""
        number = self.proposer.num_successors
        return logits.topk(min(number, logits.shape[-1])).indices if number else None

    def _fitting(self, draft: Draft) -> list[int]:
        """Draft tokens of each row that it has use and positions for."""
        room = [self._room(row) for row in self.rows.live]
        if draft.parents is None:
            return [min(count, left) for count, left in zip(draft.counts, room, strict=True)]
        levels = [depths(parents) for parents in draft.parents]
        return [
            next((index for index, depth in enumerate(row) if depth > left), len(row))
            for row, left in zip(levels, room, strict=True)
        ]

    def _room(self, row: int) -> int:
        """Draft tokens that a row has use and positions for."""
        left = self.rows.max_new_tokens - self.rows.num_new(row) - 1
        last = self.target.max_positions
        return left if last is None else max(0, min(left, last - len(self.rows.texts[row])))

    def _sound(self, tokens: Tensor, counts: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cut drafts in front of an id that doesn't exist or a distribution that isn't one, without a sync."""
        if not tokens.shape[1]:
            return tokens, counts
        sound = (tokens >= 0) & (tokens < self.vocabulary)
        if probs is not None:
            sound &= ((probs.sum(-1) - 1).abs() < 1e-2) & (probs.amin(-1) >= 0)
        return tokens.where(sound, 0), torch.minimum(counts, sound.long().cumprod(-1).sum(-1))

    def _emit(
        self, tokens: Sequence[Sequence[int]], scores: Tensor, logits: Tensor, output: Any, lengths: Sequence[int],
        accepted: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Append each live row's new tokens up to its first stop; commit the caches; let finished rows go."""
        rows, going, self.last_counts = self.rows, [], []
        for index, (row, new) in enumerate(zip(rows.live, tokens, strict=True)):
            before = rows.num_new(row)
            self.records.keep(index, row, len(new), scores, logits, output, lengths[index])
            seen = tuple(score[None] for score in self.records.row_scores[row]) if self._criteria_see_scores else None
            stopped = self.stopper.emit(rows, row, new, seen)
            self.records.drop_extra(row, rows.num_new(row))
            self.last_counts.append(rows.num_new(row) - before)
            if not stopped:
                going.append(index)
        if output is not None:
            self.target.cache.commit(self.last_counts)
            self.proposer.tell("commit", rows, accepted)
        if len(going) < len(rows.live):
            self._release(going)
        self.stream.advance()

    @property
    def _criteria_see_scores(self) -> bool:
        return self.records.keeps_scores and len(self.rows.texts) == 1 and bool(self.stopper.others)

    def _release(self, going: Sequence[int]) -> None:
        """Take finished rows out of the batch."""
        for index, row in enumerate(self.rows.live):
            if index not in going:
                self.handover.let_go(index, row)
        self.rows.live = [self.rows.live[index] for index in going]
        if going:
            self.target.cache.select(going)
            self.proposer.tell("select", going)

    def _start_drafter(self, scores: Tensor) -> None:
        """Tell the drafter about the generation, now that the vocabulary is known."""
        self.vocabulary = scores.shape[-1]
        if self.logits.impure:
            self.proposer.drop(f"the logits processor {self.logits.impure} keeps state between calls")
        self.proposer.start(
            DraftContext(
                self.model, self.rows, scores.device, self.vocabulary, self.stopper.end_tokens,
                bool(self.settings.do_sample), self.logits, self.sampler.shared_noise, self.sampler.generator, self.trees,
                getattr(self.proposer.length, "pays", None), self.config.compile,
            )
        )  # fmt: skip

    def _report(
        self, step: int, rows: list[int], drafted: list[list[int]], accepted: list[int], emitted: list[list[int]],
        sources: list[str], seconds: float,
    ) -> None:  # fmt: skip
        if self.config.on_step is None:
            return
        event = StepEvent(
            step, tuple(rows), tuple(map(tuple, drafted)), tuple(accepted), tuple(map(tuple, emitted)),
            tuple(sources), seconds,
        )  # fmt: skip
        self.config.on_step(event)

    def _output(self) -> Tensor | SpecOutput:
        """What `generate` returns, laid out as plain decoding would have it."""
        self.stats.fallback_reason = self.proposer.dropped
        cache, sequences = self.handover.give_back(self.model), self.rows.sequences()
        if not self.settings.return_dict_in_generate:
            return sequences
        return SpecOutput(
            sequences=sequences,
            **{compat.CACHE: cache},
            **self.records.fields(self.rows.pad_token),
            spec_stats=self.stats,
        )


def _tried(known: HostDecision, parents: Sequence[Sequence[int]] | None) -> list[int]:
    """At how many positions each row had a draft token whose predecessors were all accepted."""
    if parents is None:
        return [min(kept + 1, count) for kept, count in zip(known.accepted, known.drafted, strict=True)]
    ends = [path[-1] - 1 if path else -1 for path in known.paths]
    real = [row[:count] for row, count in zip(parents, known.drafted, strict=True)]
    return [kept + (end in row) for kept, end, row in zip(known.accepted, ends, real, strict=True)]


def decode(
    model: Any, call: Call, config: SpecConfig, drafter: Drafter | None
) -> tuple[Tensor | SpecOutput, SpecStats]:
    """Generate speculatively.

    Args:
        model: The target.
        call: What `generate` has prepared.
        config: The user's settings.
        drafter: Where drafts come from; `None` decodes one token a round.

    Returns:
        What `generate` returns, and the statistics.
    """
    generation = Generation(model, call, config, drafter)
    with torch.no_grad():
        output = generation.run()
        generation.ranks.wait(generation.target.dummy)
        return output, generation.stats
