"""A server that answers as it is told: stands in for vLLM, SGLang, llama.cpp and TGI."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


METRICS = Path(__file__).parent / "metrics"


def metrics(name: str) -> str:
    """One of the metric texts."""
    return (METRICS / f"{name}.txt").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Reply:
    """An answer.

    Attributes:
        body: Text or bytes.
        status: HTTP status.
        headers: More of them.
        delay: Seconds before it, and between its bytes if `drip`.
        missing: Bytes that are promised but don't come.
        raw: Sent instead of HTTP.
    """

    body: str | bytes = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    drip: bool = False
    missing: int = 0
    raw: bytes | None = None


class StandIn:
    """Answers each path with its replies, one after the other; the last one goes on. Other paths aren't there."""

    def __init__(self, replies: dict[str, list[Reply]]) -> None:
        self.replies = replies
        self.asked: list[str] = []
        self.keys: list[str | None] = []
        self.closed = threading.Event()
        self.url = ""


@contextmanager
def served(*texts: str | Reply, **others: str | Reply) -> Iterator[StandIn]:
    """A server on a free port.

    Args:
        texts: What /metrics says, one after the other.
        others: What other paths say, underscores for slashes inside.
    """
    replies = {f"/{path}": [_reply(each)] for path, each in others.items()}
    if texts:
        replies["/metrics"] = [_reply(each) for each in texts]
    stand_in = StandIn(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            stand_in.asked.append(self.path)
            stand_in.keys.append(self.headers.get("Authorization"))
            waiting = stand_in.replies.get(path, [Reply("not here", 404)])
            reply = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            stand_in.closed.wait(reply.delay)
            if reply.raw is not None:
                self.wfile.write(reply.raw)
                return
            body = reply.body.encode() if isinstance(reply.body, str) else reply.body
            self.send_response(reply.status)
            for name, value in ({"Content-Length": str(len(body) + reply.missing)} | reply.headers).items():
                self.send_header(name, value)
            self.end_headers()
            if not reply.drip:
                self.wfile.write(body)
                return
            for byte in body:
                if stand_in.closed.wait(0.05):
                    return
                self.wfile.write(bytes([byte]))

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield stand_in
        finally:
            stand_in.closed.set()
            server.shutdown()
            thread.join()


def _reply(given: str | Reply) -> Reply:
    return given if isinstance(given, Reply) else Reply(given)
