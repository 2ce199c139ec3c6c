"""What a checkpoint's files say of it: are its weights whole, and can a draft model come from it?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .asking import HubProblem
from .candidates import Repository


MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_INDEX_BYTES = 64 * 1024 * 1024  # a line a tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
# Any one of these holds the ids.
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
QUANTIZED_NAME = re.compile(
    r"(?i)(?:^|[-_.])(awq|gptq|aqlm|hqq|bnb|exl[23]|fp8|fp4|nvfp4|mxfp4|int[48]|w\d+a\d+|[2-8]-?bits?|q[2-8](?:_\w+)?"
    r"|quanti[sz]ed|mlx|onnx|openvino|ggml|gguf)(?:$|[-_.])"
)
QUANTIZED_TAGS = frozenset(
    {"4-bit", "8-bit", "awq", "gptq", "bitsandbytes", "compressed-tensors", "fp8", "mlx", "exl2"}
)


def weight_names(files: Iterable[str]) -> list[str]:
    """The safetensors files that Transformers would load: the one file, or else the shards; no second copies."""
    names = set(files)
    return [WEIGHTS] if WEIGHTS in names else sorted(name for name in names if SHARD.fullmatch(name))


def whole(file: Path) -> bool:
    """Whether a safetensors file is there and as long as its header says."""
    try:
        with safe_open(file, framework="numpy"):
            return True
    except (OSError, SafetensorError):
        return False


def complete(folder: Path) -> bool:
    """Whether a folder holds all of a checkpoint's weights, as safetensors, and whole."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).exists():
        try:
            index = read_json(folder / INDEX, MAX_INDEX_BYTES)
            names = sorted(set(index["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return False
    return bool(names) and all(Path(name).name == name and whole(folder / name) for name in names)


def read_json(file: Path, limit: int) -> dict[str, Any]:
    """Read a JSON object of at most `limit` bytes.

    Raises:
        ValueError: If it is larger, no JSON, or no object.
    """
    with file.open("rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    try:
        found = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def read_config(id: str, file: Path) -> dict[str, Any]:
    """Read the `config.json` of a checkpoint.

    Raises:
        HubProblem: If it isn't there, is too large, or is no JSON object.
    """
    try:
        return read_json(file, MAX_CONFIG_BYTES)
    except FileNotFoundError as error:
        message = f"{id} has no config.json. Pass the folder or the id of a Transformers checkpoint."
        raise HubProblem("unusable", message) from error
    except (OSError, ValueError) as error:
        raise HubProblem("unusable", f"The config.json of {id} can't be read: {error}. Pass another one.") from error


def from_folder(id: str, folder: Path, source: str, revision: str | None = None) -> Repository:
    """Describe a checkpoint on this disk.

    Raises:
        HubProblem: If its configuration can't be read.
    """
    config = read_config(id, folder / "config.json")
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()}
    return Repository(
        id=id,
        config=config,
        source=source,
        revision=revision,
        folder=folder,
        files=tuple(sizes),
        weights_bytes=sum(sizes[name] for name in weight_names(sizes)) or None,
        complete=complete(folder),
        sizes=sizes,
    )


def excluded_reason(repository: Repository) -> str | None:
    """Why no draft model can come from a repository, or `None`: its files, tags, name and configuration say so."""
    config, files = repository.config, repository.files
    name, tags = repository.id.rpartition("/")[2], {tag.lower() for tag in repository.tags}
    if "adapter_config.json" in files or "peft" in tags:
        return "it is an adapter, not a whole model"
    if not weight_names(files):
        gguf = "gguf" in tags or any(file.endswith(".gguf") for file in files)
        return "it is GGUF, not safetensors" if gguf else "it has no safetensors weights"
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        return f"it is quantised ({method or 'by an unknown method'})"
    if marks := sorted(QUANTIZED_TAGS & tags):
        return f"it is quantised or converted (tag {marks[0]})"
    if repository.source != "path" and "unquantized" not in name.lower() and (match := QUANTIZED_NAME.search(name)):
        return f"it is quantised or converted ({match[1]} in its name)"
    return custom_code_reason(config) or _not_causal_reason(config)


def custom_code_reason(config: Mapping[str, Any]) -> str | None:
    """Why a configuration needs code from its repository, or `None`. Many name such code and no longer need it."""
    if not config.get("auto_map"):
        return None
    architectures = config.get("architectures") or ()
    if architectures and set(architectures) <= _known_classes() and config.get("model_type") in _causal_kinds():
        return None
    return "it needs code from its repository (auto_map), which is never run"


@cache
def _causal_kinds() -> frozenset[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@cache
def _known_classes() -> frozenset[str]:
    import transformers

    return frozenset(dir(transformers))


def _not_causal_reason(config: Mapping[str, Any]) -> str | None:
    architectures = config.get("architectures") or ()
    kind = config.get("model_type")
    if kind and kind not in _causal_kinds():
        return f"the installed Transformers has no causal language model of type {kind!r}"
    if config.get("draft_vocab_size") or config.get("eagle_config"):
        return "it is a draft head, not a whole model"
    for name in architectures:
        if str(name).endswith(("ForCausalLM", "LMHeadModel")):
            return None
        # Models of text and images whose text part is a causal language model.
        if str(name).endswith("ForConditionalGeneration") and isinstance(config.get("text_config"), Mapping):
            return None
    return f"it is no causal language model ({', '.join(map(str, architectures)) or 'no architecture named'})"
