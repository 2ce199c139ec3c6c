"""The page on a Space: on a CPU, a GPU, or ZeroGPU. `hf-specdec demo --web` is the same page at home.

Variables of the Space: `HF_SPECDEC_DEMO_TARGET` and `HF_SPECDEC_DEMO_DRAFT` show models of your own, by Hub id.
"""

import os


try:
    import spaces  # first: on ZeroGPU it has to stand in for CUDA before torch looks for it
except ImportError:
    spaces = None

import logging

import torch

from hf_specdec import SpecDecError
from hf_specdec.web.app import build, launch
from hf_specdec.web.models import families, own_family
from hf_specdec.web.zerogpu import on_zerogpu


logger = logging.getLogger("hf_specdec.space")

IS_ZEROGPU = spaces is not None and os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")
TARGET, DRAFT = (os.environ.get(f"HF_SPECDEC_DEMO_{name}") or None for name in ("TARGET", "DRAFT"))

on_gpu = IS_ZEROGPU or torch.cuda.is_available()
if TARGET is None:
    offered = families(on_gpu)
else:
    offered = {"own": own_family(TARGET, DRAFT, "bfloat16" if on_gpu else "float32")}
page = build(offered, wrap=on_zerogpu(spaces.GPU) if IS_ZEROGPU else None)

if __name__ == "__main__":
    # ZeroGPU packs at launch what was put on "cuda" until then (there `torch.cuda.is_available()` is true, so that
    # `load` puts it there) and hands it to each worker; what a worker loads itself is lost with it. Elsewhere it
    # spares the first visitor the wait.
    for family in offered.values():
        try:
            family.load()
        except SpecDecError as error:
            logger.warning("%s", error)  # the page opens all the same, and its runs say why they can't begin
    launch(page)
