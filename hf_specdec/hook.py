"""The door: how calls of `model.generate` reach the loop, and how the others stay as they are.

`enable()` re-points three entries of Transformers' table of decoding methods and wraps two methods of
`GenerationMixin`; `enable(model)` gives one model a subclass of its class that does the same. Either way `generate`
prepares everything as usual and the loop gets what the native loop would have got. Nothing is changed on import.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation import GenerationMixin, GenerationMode, StoppingCriteriaList, StopStringCriteria
from transformers.generation import utils as native

from .config import SpecConfig
from .drafters.prompt_lookup import PromptLookup
from .engine import compat, graphs
from .errors import SpecDecError, UnsupportedModelError
from .request import Request, native_reason, read_request
from .routing import note_plain, remember, run, run_plainly
from .stats import SpecStats


OURS = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
_LOCK = threading.Lock()
_ORIGINALS: dict[str, Any] = {}


def _prepare(original: Callable[..., Any], self: Any, generation_config: Any = None, **kwargs: Any) -> Any:
    """`_prepare_generation_config`, taking `speculative=` out of the arguments and noting what the user gave."""
    request = read_request(self, generation_config, kwargs)
    prepared, model_kwargs = original(self, generation_config, **kwargs)
    prepared._hf_specdec = request
    return prepared, model_kwargs


def _validate(original: Callable[..., Any], self: Any, mode: Any, generation_config: Any, mode_kwargs: Any) -> None:
    """`_validate_generation_mode`, without the checks that bind Transformers' own loop alone."""
    request: Request = getattr(generation_config, "_hf_specdec", None) or Request()
    config = request.config(generation_config, mode_kwargs.get("assistant_model"))
    if config is not None and mode not in OURS:
        reason = f"decoding mode '{mode.value}' is not sped up"
        note_plain(config, reason)
        remember(self, SpecStats(fallback_reason=reason))
    if config is not None and mode is GenerationMode.ASSISTED_GENERATION and not native_reason(generation_config):
        mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
        mode_kwargs = {name: value for name, value in mode_kwargs.items() if not name.startswith("assistant_")}
    original(self, mode, generation_config, mode_kwargs)


def _route(self: Any, sample: Callable[..., Any], assisted: Callable[..., Any] | None, call: dict[str, Any]) -> Any:
    """Send a prepared call to our loop, or to the native one it came from (`assisted` if given, else `sample`)."""
    settings = call["generation_config"]
    request: Request = getattr(settings, "_hf_specdec", None) or Request()
    config = request.config(settings, call.get("assistant_model"))
    if config is None or settings.is_assistant or (assisted is not None and native_reason(settings)):
        return (assisted or sample)(self, **call)
    settings._hf_specdec = None  # a native loop that this call falls back to must not be routed again
    return run(self, sample, config, call)


def _sample_entry(self: Any, input_ids: Tensor, **call: Any) -> Any:
    return _route(self, type(self)._sample, None, {"input_ids": input_ids, **call})


def _assisted_entry(self: Any, input_ids: Tensor, **call: Any) -> Any:
    return _route(self, type(self)._sample, type(self)._assisted_decoding, {"input_ids": input_ids, **call})


def enable(model: Any = None) -> None:
    """Let `generate` take `speculative=`, and send `assistant_model=` and `prompt_lookup_num_tokens=` to our loop.

    Args:
        model: One model; `None` means every model of the process. Safe to call again.

    Raises:
        UnsupportedModelError: If the installed Transformers keeps its decoding methods elsewhere.
    """
    _check_host()
    with _LOCK:
        if model is not None:
            if not isinstance(model, _EnabledModel):
                base: Any = type(model)
                model.__class__ = _enabled_class(base)
            return
        if _ORIGINALS:
            return
        for name, wrapper in (("_prepare_generation_config", _prepare), ("_validate_generation_mode", _validate)):
            _ORIGINALS[name] = getattr(GenerationMixin, name)
            setattr(GenerationMixin, name, _bound_wrapper(wrapper, _ORIGINALS[name]))
        GenerationMixin._hf_specdec_sample = _sample_entry
        GenerationMixin._hf_specdec_assisted = _assisted_entry
        for mode in OURS:
            _ORIGINALS[mode] = native.GENERATION_MODES_MAPPING[mode]
            assisted = mode is GenerationMode.ASSISTED_GENERATION
            native.GENERATION_MODES_MAPPING[mode] = "_hf_specdec_assisted" if assisted else "_hf_specdec_sample"


def disable(model: Any = None) -> None:
    """Undo `enable()`, and free the CUDA graphs that were kept for the next call.

    Args:
        model: One model; `None` undoes the process-wide `enable()`. Safe to call again.
    """
    with _LOCK:
        if model is not None:
            graphs.free(model)
            if isinstance(model, _EnabledModel):
                model.__class__ = type(model)._hf_specdec_base
            return
        graphs.free()
        for key, original in _ORIGINALS.items():
            if isinstance(key, GenerationMode):
                native.GENERATION_MODES_MAPPING[key] = original
            else:
                setattr(GenerationMixin, key, original)
        if _ORIGINALS:
            del GenerationMixin._hf_specdec_sample, GenerationMixin._hf_specdec_assisted
        _ORIGINALS.clear()


def _bound_wrapper(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    return method


def _check_host() -> None:
    """Make sure that Transformers' decoding methods are where this file expects them."""
    expected = {"input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"}
    for name in ("_sample", "_assisted_decoding"):
        method = getattr(GenerationMixin, name, None)
        if method is None or not expected <= set(inspect.signature(method).parameters):
            raise UnsupportedModelError(
                f"The installed Transformers has no `GenerationMixin.{name}` of the known form. "
                "Call `hf_specdec.generate(model, ...)`, which needs no hook, or install transformers>=5.18,<6."
            )


_new = object.__new__


class _EnabledModel:
    """Mixed into the class of a model that was enabled alone."""

    _hf_specdec_base: type

    def _prepare_generation_config(self, generation_config: Any = None, **kwargs: Any) -> Any:
        return _prepare(self._hf_specdec_base._prepare_generation_config, self, generation_config, **kwargs)  # type: ignore[attr-defined]

    def _validate_generation_mode(self, mode: Any, generation_config: Any, mode_kwargs: Any) -> None:
        _validate(self._hf_specdec_base._validate_generation_mode, self, mode, generation_config, mode_kwargs)  # type: ignore[attr-defined]

    def _sample(self, input_ids: Tensor, **call: Any) -> Any:
        return _route(self, self._hf_specdec_base._sample, None, {"input_ids": input_ids, **call})  # type: ignore[attr-defined]

    def _assisted_decoding(self, input_ids: Tensor, **call: Any) -> Any:
        base: Any = self._hf_specdec_base
        return _route(self, base._sample, base._assisted_decoding, {"input_ids": input_ids, **call})

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickled as the class that a process without hf_specdec knows
        reduced: Any = super().__reduce_ex__(protocol)
        return (_new, (self._hf_specdec_base,), *reduced[2:])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make, arguments, state, *_ = self.__reduce_ex__(4)
        duplicate = make(*arguments)
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(state, memo))
        enable(duplicate)
        return duplicate


@functools.cache
def _enabled_class(base: Any) -> Any:
    return type(
        base.__name__,
        (_EnabledModel, base),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "_hf_specdec_base": base,
        },
    )


def decoder(
    *, streamer: Any = None, tokenizer: Any = None, assistant_tokenizer: Any = None, stop_strings: Any = None,
    speculative: Any = True, synced_gpus: bool | None = None, **fields: Any,
) -> Callable[..., Any]:  # fmt: skip
    """A decoding function for Transformers' own extension point, `generate(..., custom_generate=decoder(...))`.

    Args:
        streamer: Streamer; pass it here, as `generate` drops it for custom functions.
        tokenizer: Tokenizer for `stop_strings`, and for drafts across vocabularies.
        assistant_tokenizer: The draft model's tokenizer, for drafts across vocabularies.
        stop_strings: Strings that end a text; pass them here, for the same reason.
        speculative: As in `generate(..., speculative=...)`.
        synced_gpus: As in `model.generate`; pass it here, for the same reason. By default true for FSDP and DeepSpeed ZeRO-3.
        **fields: Fields of `SpecConfig`.

    Returns:
        A function to pass as `custom_generate`.

    Raises:
        SpecDecError: If a field is unknown or wrong, or `stop_strings` come without a tokenizer.
    """
    try:
        config = SpecConfig.from_argument(speculative, **fields)
    except TypeError as error:
        raise SpecDecError(f"`decoder` takes the fields of SpecConfig: {error}.") from error
    if stop_strings is not None and tokenizer is None:
        raise SpecDecError("`stop_strings` need a `tokenizer=` to be found in tokens.")

    def speculative_decoding(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        criteria = StoppingCriteriaList(stopping_criteria)
        if stop_strings is not None:
            criteria.insert(0, StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
        if streamer is not None:
            streamer.put(input_ids.cpu())
        call = {
            "input_ids": input_ids,
            "logits_processor": logits_processor,
            "stopping_criteria": criteria,
            "generation_config": generation_config,
            "streamer": streamer,
            "synced_gpus": compat.is_synced(model) if synced_gpus is None else synced_gpus,
            **model_kwargs,
        }
        mode = generation_config.get_generation_mode(None)
        plain = _native_method(model, mode)
        if config is None or Request.is_switched_off():
            return plain(model, **call)
        if mode not in OURS:
            return run_plainly(model, plain, config, call, f"decoding mode '{mode.value}' is not sped up")
        request: Request = getattr(generation_config, "_hf_specdec", None) or Request()
        generation_config._hf_specdec = None
        call |= {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
        return run(model, plain, request.refine(config, generation_config), call)

    return speculative_decoding


def _native_method(model: Any, mode: Any) -> Callable[..., Any]:
    """Transformers' own method for a decoding mode, whether or not hooks are installed."""
    kind = compat.model_class(model)
    name = "_sample" if mode in OURS else native.GENERATION_MODES_MAPPING[mode]
    method: Callable[..., Any] = getattr(kind, name)
    return method


def generate(
    model: Any, inputs: Tensor | None = None, *, speculative: Any = True, assistant_model: Any = None,
    streamer: Any = None, tokenizer: Any = None, assistant_tokenizer: Any = None, stop_strings: Any = None,
    prompt_lookup_num_tokens: int | None = None, max_matching_ngram_size: int | None = None,
    generation_config: Any = None, synced_gpus: bool | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """`model.generate` with speculation, without any hook.

    Args:
        model: The target model.
        inputs: Token ids `[batch, length]`, as in `model.generate`.
        speculative: `True`, a drafter's name, a `SpecConfig` or a `Drafter`; `False` decodes plainly.
        assistant_model: Draft model, its id or path; the same as `SpecConfig(draft_model=...)`.
        streamer: As in `model.generate`.
        tokenizer: As in `model.generate`; needed for `stop_strings` and, where it isn't saved with the model, for a draft
            model with other token ids.
        assistant_tokenizer: As in `model.generate`: the draft model's, for the same case.
        stop_strings: As in `model.generate`.
        prompt_lookup_num_tokens: As in `model.generate`: draft this many tokens by lookup.
        max_matching_ngram_size: As in `model.generate`: longest n-gram to look up.
        generation_config: As in `model.generate`.
        synced_gpus: As in `model.generate`.
        **kwargs: Everything else that `model.generate` takes.

    Returns:
        What `model.generate` returns; with `return_dict_in_generate=True` a `SpecOutput`, which has `spec_stats`.

    Raises:
        SpecDecError: If `speculative` is none of the above.
    """
    config = SpecConfig.from_argument(speculative, draft_model=assistant_model)
    if config is not None and prompt_lookup_num_tokens is not None:
        lookup = PromptLookup(max_ngram=max_matching_ngram_size or 4)
        config = SpecConfig.from_argument(config, drafter=lookup, num_draft_tokens=prompt_lookup_num_tokens)
    request = read_request(model, generation_config, kwargs)
    if config is not None:
        config = request.refine(config, None, assistant_model)
    saved = getattr(model.generation_config, "stop_strings", None)
    if saved is not None:  # `generate` refuses them without a tokenizer, which it drops for custom functions
        kwargs["stop_strings"] = None
    if getattr(generation_config, "stop_strings", None) is not None:
        saved = generation_config.stop_strings
        generation_config = copy.deepcopy(generation_config)
        generation_config.stop_strings = None
    settings: dict[str, Any] = {} if generation_config is None else {"generation_config": generation_config}
    custom = decoder(
        streamer=streamer, tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer,
        stop_strings=stop_strings or saved, speculative=config or False, synced_gpus=synced_gpus,
    )  # fmt: skip
    return model.generate(inputs, custom_generate=custom, **settings, **kwargs)
