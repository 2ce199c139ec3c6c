"""The stand-in of the Hub, and an environment in which `huggingface_hub` asks it and nobody else."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http, disable_progress_bars, enable_progress_bars

from .family import fill
from .hub_server import HubServer


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The stand-in with the family, an empty cache, no token and no waiting between retries.

    The library reads its environment once, at import, so its constants are what is set here.
    """
    with HubServer() as server:
        fill(server)
        home = tmp_path / "huggingface"
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HOME", str(home))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        quick = types.SimpleNamespace(**vars(time) | {"sleep": lambda seconds: time.sleep(min(seconds, 0.01))})
        monkeypatch.setattr(_http, "time", quick)
        monkeypatch.setattr(file_download, "time", quick)
        disable_progress_bars()
        yield server
        if not server.released.is_set():
            server.stop()
        for thread in threading.enumerate():  # questions that nobody waits for any more
            if thread.name == "hf-specdec-hub":
                thread.join(10)
        _http.close_session()
        enable_progress_bars()
