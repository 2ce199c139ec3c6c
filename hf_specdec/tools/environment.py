"""Versions and hardware: what a measurement or a bug report has to name."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


PACKAGES = (
    "hf-specdec",
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "numpy",
)
# Settings that change results or speed. Nothing secret: tokens aren't in this list.
SETTINGS = (
    "HF_SPECDEC_DISABLE",
    "HF_SPECDEC_CACHE",
    "HF_SPECDEC_LEAN",
    "HF_SPECDEC_GRAPHS",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
)


def package_versions() -> dict[str, str | None]:
    """Return Python's version and those of the packages that matter; `None` for one that isn't installed."""
    return {"python": platform.python_version()} | {package: version_of(package) for package in PACKAGES}


def version_of(package: str) -> str | None:
    """Return a package's version, `None` if it isn't installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_environment() -> dict[str, Any]:
    """Return versions, hardware and settings as plain JSON types."""
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "versions": package_versions(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "cuda": torch.version.cuda,
        "gpus": [{"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)} for gpu in gpus],
        "mps": torch.backends.mps.is_available(),
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def git_revision() -> str | None:
    """Return the commit of the checkout that this package runs from, "-dirty" behind it if files were changed.

    `None` where it doesn't run from a checkout.
    """
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def cpu_name() -> str:
    """Return the processor's model name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    """Return the physical memory in GiB; `None` where the system doesn't tell it this way."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
