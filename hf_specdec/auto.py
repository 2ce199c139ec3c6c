"""`import hf_specdec.auto` is `hf_specdec.enable()`."""

from .hook import enable


enable()
