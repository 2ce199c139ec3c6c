"""A `custom_generate` folder: Transformers' own way to run another loop, from the Hub or from a disk.

`model.generate(..., custom_generate=FOLDER, trust_remote_code=True)` calls `custom_generate/generate.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SpecDecError


if TYPE_CHECKING:
    from .render import Setup

GENERATE = '''"""Lossless speculative decoding, for `model.generate(..., custom_generate=..., trust_remote_code=True)`."""

import hf_specdec


SETTINGS = {settings}


def generate(inputs=None, *, model, custom_generate=None, speculative=True, **kwargs):
    """What `model.generate` does, with drafts; `speculative=False` decodes plainly."""
    if custom_generate is not None:
        # of a model that was loaded from this folder, `generate` is this function
        return type(model).generate(model, inputs, custom_generate=custom_generate, **kwargs)
    if speculative is True:
        speculative = hf_specdec.SpecConfig(**SETTINGS)
    return hf_specdec.generate(model, inputs, speculative=speculative, **kwargs)
'''
README = """---
library_name: transformers
tags:
- custom_generate
---

# Speculative decoding for {target}

Drafts {drafts}. The text is the one that the model writes alone: greedy decoding gives the same tokens, up to rounding,
and sampling the same distribution.

```python
{load}output = model.generate(**inputs, custom_generate={folder}, trust_remote_code=True)
```

`trust_remote_code=True` lets Transformers run `custom_generate/generate.py` of this folder. It calls `hf_specdec`
(`pip install hf-specdec`) with the settings below; `speculative=False` decodes plainly.

```python
{settings}
```
"""
LOAD = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({target})
model = AutoModelForCausalLM.from_pretrained({target}, dtype="auto")
inputs = tokenizer("...", return_tensors="pt").to(model.device)
"""
REQUIREMENTS = "hf-specdec\n"


def as_python(value: object) -> str:
    """A text or a number as it is written in Python, in double quotes."""
    return json.dumps(value, ensure_ascii=False)


def folder_files(setup: Setup) -> dict[str, str]:
    """The files of the folder: path below it → text.

    Args:
        setup: Drafter, draft model and number of draft tokens; without a number the length adapts itself.
    """
    settings: dict[str, object] = {"drafter": setup.method}
    if setup.draft is not None:
        settings["draft_model"] = setup.draft
    if setup.num_draft_tokens is not None:
        settings["num_draft_tokens"] = setup.num_draft_tokens
    written = "{\n" + "".join(f'    "{name}": {as_python(value)},\n' for name, value in settings.items()) + "}"
    drafts = f"come from {setup.draft} ({setup.method})" if setup.draft else f"come from {setup.method}"
    load = LOAD.format(target=as_python(setup.target))
    return {
        "README.md": README.format(
            target=setup.target, drafts=drafts, load=load, folder=as_python(setup.folder), settings=written
        ),
        "custom_generate/generate.py": GENERATE.format(settings=written),
        "custom_generate/requirements.txt": REQUIREMENTS,
    }


def write_folder(folder: Path, files: dict[str, str]) -> None:
    """Write the files; others in the folder stay as they are.

    Args:
        folder: Made where it isn't there.
        files: From `folder_files`.

    Raises:
        SpecDecError: If a file is there already and says something else, or can't be written.
    """
    try:
        for name, text in files.items():
            file = folder / name
            if file.exists() and file.read_text(encoding="utf-8") != text:
                raise SpecDecError(f"{file} is there already and says something else. Pass another --out.")
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecDecError(f"The folder {folder} can't be written: {error}. Pass another --out.") from error
