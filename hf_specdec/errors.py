"""The errors that hf_specdec raises.

SpecDecError (a ValueError)
├── IncompatibleDraftError     the draft can't propose tokens for this target
├── PlacementError             target and draft don't fit on the devices
├── UnsupportedCacheError      the cache can't be rolled back
└── UnsupportedModelError      the target, or a `generate` option, can't be sped up

By default only wrong arguments raise: an unsupported case decodes plainly and logs its reason once.
With `SpecConfig(strict=True)` the unsupported cases raise too.
"""


class SpecDecError(ValueError):
    """Base class: the message says what is wrong, what was got and what to do."""


class IncompatibleDraftError(SpecDecError):
    """The draft can't propose tokens for this target."""


class UnsupportedCacheError(SpecDecError):
    """The cache can't be rolled back after a rejected draft."""


class UnsupportedModelError(SpecDecError):
    """The target model, or an option of `generate`, can't be combined with speculation."""


class PlacementError(SpecDecError):
    """Target and draft don't fit where they were to be placed; the message has the numbers."""
