"""What several commands do with their arguments before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer


def names_of(text: str) -> list[str]:
    """Names between commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def batch_sizes_of(text: str) -> tuple[int, ...]:
    """Numbers between commas.

    Raises:
        typer.BadParameter: If they aren't different numbers from 1.
    """
    try:
        numbers = tuple(int(name) for name in names_of(text))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise typer.BadParameter(f"--batch takes different numbers from 1, such as 1,8; got {text!r}.")
    return numbers


def try_places(files: Iterable[Path]) -> None:
    """Find out that nothing can be written there before the measuring, not after; folders are made.

    Raises:
        SpecDecError: If a file can't be written.
    """
    from ..errors import SpecDecError

    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            new = not file.exists()
            file.open("a").close()
            if new:
                file.unlink()
        except OSError as error:
            raise SpecDecError(f"{file} can't be written ({error.strerror}). Name another place.") from error
