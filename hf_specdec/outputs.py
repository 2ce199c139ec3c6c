"""The output of a speculative `generate(..., return_dict_in_generate=True)`."""

from dataclasses import dataclass

from transformers.generation import GenerateDecoderOnlyOutput

from .stats import SpecStats


@dataclass
class SpecOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """Transformers' own output with one field more.

    Attributes:
        spec_stats: What speculation did in this call.
    """

    spec_stats: SpecStats | None = None
