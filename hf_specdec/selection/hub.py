"""What the Hub, its local cache and folders know of checkpoints, and fetching one of them.

Every look-up takes a bounded time, whatever the Hub does: a draft that isn't found costs speed, a call that hangs
costs the answer. Weights are safetensors only, and code of a repository is neither fetched nor run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    is_offline_mode,
)
from huggingface_hub.errors import HFValidationError

from .asking import HubProblem, ask, ask_all, offline_problem, problem
from .candidates import Repository
from .files import (
    INDEX,
    MAX_CONFIG_BYTES,
    TOKENIZER_FILES,
    VOCABULARY_FILES,
    complete,
    custom_code_reason,
    excluded_reason,
    from_folder,
    read_config,
    weight_names,
    whole,
)


__all__ = [
    "HubProblem",
    "cached",
    "describe",
    "download",
    "excluded_reason",
    "is_offline",
    "search",
    "tokenizer_folder",
]

METADATA_SECONDS = 5.0  # for one question, retries included
TOKENIZER_SECONDS = 30.0  # up to 40 MB, and nothing can be verified without
NUMBER_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}

Token = str | bool | None


def is_offline() -> bool:
    """Whether the environment forbids asking the Hub (`HF_HUB_OFFLINE`)."""
    return is_offline_mode()


def describe(
    id: str, *, revision: str | None = None, token: Token = None, local_files_only: bool = False
) -> Repository:
    """Read a checkpoint's configuration and list of files, never its weights.

    When the Hub may not be asked, doesn't answer or refuses, the answer is what the local cache has of it.

    Args:
        id: A local folder, or a Hub id.
        revision: Branch, tag or commit; the commit that was read is pinned in the answer.
        token: Token of the Hub; `None` takes the one of the environment or of the login.
        local_files_only: Ask the cache alone.

    Raises:
        HubProblem: If there is nothing to read.
    """
    if os.path.isdir(id):
        return from_folder(id, Path(id), "path")
    try:
        hf_hub_url(id, "config.json")  # no request: it checks the id
    except HFValidationError as error:
        message = f"{id!r} is neither a folder nor a Hub id. Pass an existing folder, or an id such as 'org/name'."
        raise HubProblem("missing", message) from error
    try:
        if local_files_only or is_offline():
            raise offline_problem(id)
        return _from_hub(id, revision, token)
    except HubProblem as problem:
        stored = None if problem.kind in ("missing", "unusable") else _stored(id, revision)
        if stored is None:
            raise
        return stored


def tokenizer_folder(repository: Repository, *, token: Token = None, local_files_only: bool = False) -> Path | None:
    """Folder with a checkpoint's tokenizer, its files downloaded where they aren't there, and no others.

    Args:
        repository: What `describe`, `search` or `cached` said of it.
        token: Token of the Hub; `None` takes the one of the environment or of the login.
        local_files_only: Never download.

    Returns:
        The folder, or `None` if the checkpoint has no tokenizer.

    Raises:
        HubProblem: If the files are on the Hub and can't be fetched.
    """
    folder = repository.folder
    names = [name for name in TOKENIZER_FILES if name in repository.files]
    here = folder is not None and any((folder / name).is_file() for name in VOCABULARY_FILES)
    if here and all((folder / name).is_file() for name in names):  # type: ignore[operator]
        return folder
    if repository.source == "path":
        return None
    if local_files_only or is_offline():
        if here:
            return folder
        raise offline_problem(f"the tokenizer of {repository.id}")
    repository = _listed(repository, token)
    names = [name for name in TOKENIZER_FILES if name in repository.files]
    if not any(name in VOCABULARY_FILES for name in names):
        return None
    return _fetch_small(repository, names, token)


def cached(authors: Sequence[str] | None = None) -> list[Repository]:
    """The whole checkpoints of causal language models in the local Hub cache.

    The folders are walked here: `scan_cache_dir` gives up a repository over one dangling reference or link, and reads
    the status of every file of every data set.

    Args:
        authors: Users or organisations to look at; `None` means all.
    """
    wanted = None if authors is None else {author.lower() for author in authors}
    found = []
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        id = _id_of(folder)
        if wanted is None or id.partition("/")[0].lower() in wanted:
            repository = _stored(id, None)
            if repository is not None and repository.complete and excluded_reason(repository) is None:
                found.append(repository)
    return found


def search(author: str, words: Sequence[str], *, token: Token = None, limit: int = 50) -> list[Repository]:
    """An author's causal language models with safetensors weights, the most downloaded first, with configurations.

    Those that no draft comes from (`excluded_reason`) are left out. One whose configuration could not be read is
    kept, and says so in `problem`.

    Args:
        author: User or organisation.
        words: Parts of the name, in any case; all must be there.
        token: Token of the Hub; `None` takes the one of the environment or of the login.
        limit: How many of the author's models to look at.

    Raises:
        HubProblem: If the Hub can't be asked or doesn't answer.
    """
    if is_offline():
        raise offline_problem(f"what {author} has published")
    properties: Any = ["config", "gated", "safetensors", "sha", "siblings", "tags"]

    def listing() -> list[Repository]:
        models = HfApi(token=token).list_models(
            author=author,
            search=max(words, key=len, default=None),
            filter="safetensors",
            sort="downloads",
            limit=limit,
            expand=properties,
        )
        return [_from_listing(info) for info in models]

    found = [
        repository
        for repository in ask(METADATA_SECONDS, author, listing)
        if all(word.lower() in repository.id.lower() for word in words) and excluded_reason(repository) is None
    ]
    answers = ask_all(METADATA_SECONDS, author, [_reading(repository, token) for repository in found])
    found = [
        replace(repository, problem=str(answer)) if isinstance(answer, HubProblem) else answer
        for repository, answer in zip(found, answers, strict=True)
    ]
    return [repository for repository in found if repository.problem or excluded_reason(repository) is None]


def download(
    repository: Repository, *, announce: Callable[[str], None], token: Token = None, local_files_only: bool = False
) -> Path:
    """Bring a checkpoint into the local Hub cache, and say so before.

    Fetched are safetensors weights with their index, configurations, tokenizer and chat template; nothing else.

    Args:
        repository: What `describe`, `search` or `cached` said of it.
        announce: Called with one line before the first byte of the weights is asked for.
        token: Token of the Hub; `None` takes the one of the environment or of the login.
        local_files_only: Never download.

    Returns:
        The folder with the whole checkpoint.

    Raises:
        HubProblem: If it can't be fetched, isn't whole afterwards, or may not be loaded.
    """
    local = repository.source == "path" or local_files_only or is_offline()
    if not local and not repository.complete:
        repository = _listed(repository, token)
    if reason := custom_code_reason(repository.config):
        raise HubProblem("unusable", f"{repository.id} isn't loaded: {reason}. Pass another draft.")
    if repository.complete and repository.folder is not None:
        return repository.folder
    if local and repository.source != "path":
        raise offline_problem(f"the weights of {repository.id}")
    names = weight_names(repository.files)
    if not names or repository.source == "path":
        message = (
            f"{repository.id} has no whole safetensors weights, and other formats can run code when they are loaded. "
            "Pass another draft, or convert it with `save_pretrained` first."
        )
        raise HubProblem("unusable", message)
    small = (*TOKENIZER_FILES, "generation_config.json", INDEX)
    folder = _fetch_small(repository, [name for name in small if name in repository.files], token)
    names = [name for name in names if not whole(folder / name)]
    if names:
        # Asked first, without retries: a refusal comes at once, and before the announcement.
        url = hf_hub_url(repository.id, names[0], revision=repository.revision)
        ask(METADATA_SECONDS, repository.id, lambda: get_hf_file_metadata(url, token, METADATA_SECONDS))
        size = sum(repository.sizes.get(name, 0) for name in names)
        announce(f"downloading {repository.id}, {_readable(size)}, to {constants.HF_HUB_CACHE}")
    for name in names:
        _fetch_weights(repository, folder / name, token)
    if not complete(folder):
        message = f"{repository.id} lacks weights that its {INDEX} names. Pass another draft."
        raise HubProblem("unusable", message)
    _note_main(repository, token)
    return folder


def _from_hub(id: str, revision: str | None, token: Token) -> Repository:
    """What the Hub says of one repository, with its configuration."""
    seconds = METADATA_SECONDS
    api = HfApi(token=token)
    info = ask(seconds, id, lambda: api.model_info(id, revision=revision, files_metadata=True, timeout=seconds))
    repository = _from_listing(info)
    if "config.json" not in repository.files:
        raise HubProblem("unusable", f"{id} has no config.json, so Transformers can't load it. Pass another one.")
    if repository.sizes.get("config.json", 0) > MAX_CONFIG_BYTES:
        limit = _readable(MAX_CONFIG_BYTES)
        raise HubProblem("unusable", f"The config.json of {id} is larger than {limit}. Pass another one.")
    found = ask(seconds, id, _reading(repository, token))
    assert isinstance(found, Repository)
    return found


def _listed(repository: Repository, token: Token) -> Repository:
    """The repository with the sizes of all its files at its commit."""
    if repository.source == "hub" and repository.sizes:
        return repository
    return _from_hub(repository.id, repository.revision, token)


def _from_listing(info: Any) -> Repository:
    """A repository as the Hub lists it; its configuration is an extract."""
    siblings = info.siblings or ()
    sizes = {sibling.rfilename: sibling.size for sibling in siblings if isinstance(sibling.size, int)}
    files = tuple(str(sibling.rfilename) for sibling in siblings)
    weights = [sizes[name] for name in weight_names(files) if name in sizes]
    if not weights and info.safetensors is not None:
        weights = [count * NUMBER_BYTES.get(dtype, 1) for dtype, count in info.safetensors.parameters.items()]
    return Repository(
        id=str(info.id),
        config=info.config if isinstance(info.config, dict) else {},
        source="hub",
        revision=info.sha,
        files=files,
        weights_bytes=sum(weights) or None,
        tags=tuple(info.tags or ()),
        gated=bool(info.gated),
        sizes=sizes,
    )


def _reading(repository: Repository, token: Token) -> Callable[[], Repository]:
    """A call that reads the whole configuration of a listed repository."""

    def read() -> Repository:
        file = Path(_fetching(repository, "config.json", token)())
        config = read_config(repository.id, file)
        return replace(repository, config=config, folder=file.parent, complete=complete(file.parent))

    return read


def _fetching(repository: Repository, name: str, token: Token, again: bool = False) -> Callable[[], str]:
    """A call that brings one file of the pinned commit into the cache and gives its path."""
    return lambda: hf_hub_download(
        repository.id,
        name,
        revision=repository.revision,
        cache_dir=constants.HF_HUB_CACHE,
        token=token,
        etag_timeout=METADATA_SECONDS,
        force_download=again,
    )


def _fetch_small(repository: Repository, names: Sequence[str], token: Token) -> Path:
    """Bring the configuration and these files into the cache; the folder that has them."""
    calls = [_fetching(repository, name, token) for name in ("config.json", *names)]
    answers = ask_all(TOKENIZER_SECONDS, repository.id, calls)
    for answer in answers:
        if isinstance(answer, HubProblem):
            raise answer
    return Path(answers[0]).parent


def _fetch_weights(repository: Repository, file: Path, token: Token) -> None:
    """Bring one file of weights into the cache. Each read is bounded, by HF_HUB_DOWNLOAD_TIMEOUT; the whole is not."""
    try:
        # One that is there and damaged is fetched anew; the library would take it for good.
        _fetching(repository, file.name, token, again=file.exists())()
    except Exception as error:
        raise problem(repository.id, error) from error
    size, expected = file.stat().st_size, repository.sizes.get(file.name)
    if (expected is not None and size != expected) or not whole(file):
        message = f"{file.name} of {repository.id} came damaged: {size} bytes of {expected}. Try again."
        raise HubProblem("network", message)


def _note_main(repository: Repository, token: Token) -> None:
    """Note in the cache that main is the commit that was fetched, if it is: then its name alone loads it offline."""
    main = replace(repository, revision=None)
    try:
        info = ask(METADATA_SECONDS, main.id, lambda: HfApi(token=token).model_info(main.id, timeout=METADATA_SECONDS))
        if info.sha == repository.revision:
            ask(METADATA_SECONDS, main.id, _fetching(main, "config.json", token))
    except HubProblem:
        pass  # a convenience; the folder is what is loaded


def _stored(id: str, revision: str | None) -> Repository | None:
    """What the cache has of a repository: of all its commits a whole one first, then main, then the newest."""
    place = Path(constants.HF_HUB_CACHE) / f"models--{id.replace('/', '--')}"
    main = _reference(place, revision or "main")
    found = []
    for folder in place.glob("snapshots/*"):
        if revision is not None and folder.name not in (revision, main):
            continue
        try:
            repository = from_folder(id, folder, "cache", folder.name)
            found.append((repository.complete, folder.name == main, folder.stat().st_mtime, repository))
        except (HubProblem, OSError):
            continue
    return max(found, key=lambda entry: entry[:3])[3] if found else None


def _reference(place: Path, name: str) -> str | None:
    """The commit that a branch or tag stood for when the cache last saw it."""
    refs = (place / "refs").resolve()
    file = (refs / name).resolve()
    try:
        return file.read_text(encoding="utf-8").strip() if file.is_relative_to(refs) else None
    except (OSError, ValueError):
        return None


def _id_of(place: Path) -> str:
    return place.name.removeprefix("models--").replace("--", "/")


def _readable(size: int) -> str:
    """A number of bytes, as the Hub writes it."""
    amount, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if amount >= 100 or unit == "B" else f"{amount:.1f} {unit}"
