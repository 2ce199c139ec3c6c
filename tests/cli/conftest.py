"""The command line, run as a shell would."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from hf_specdec import cli


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `hf-specdec` with these arguments in an 80-column terminal; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hf-specdec", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        out, err = capsys.readouterr()
        return int(exit_info.value.code or 0), out, err

    return run
