"""A stand-in for the Hub: a real HTTP server that speaks the endpoints `huggingface_hub` uses, and can misbehave.

It keeps the order of all requests. Files in LFS are served as the Hub serves them: the answer to `resolve` names the
size and hash and leads to another host, which must not see the token.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import socket
import struct
import threading
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit


LFS = (".safetensors", ".bin", ".gguf", ".pt")


class Request(NamedTuple):
    """One request: `what` is `"info"`, `"list"`, `"tree"`, `"file"` or `"cdn"`; `name` that of the file."""

    method: str
    what: str
    id: str
    name: str = ""
    token: str | None = None


@dataclass
class Fault:
    """How a repository misbehaves, on which requests (`what` or the name of a file) and how often."""

    kind: str
    on: str = "*"
    times: int | None = None
    retry_after: int = 0


@dataclass
class Stored:
    """A repository: its commits, oldest first, and what is said of it."""

    id: str
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    downloads: int = 0
    readers: tuple[str, ...] | None = None  # tokens that may read it; None: it isn't gated

    @property
    def main(self) -> str:
        return list(self.commits)[-1]


@cache
def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@cache
def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@cache
def parameters(data: bytes) -> int:
    (length,) = struct.unpack("<Q", data[:8])
    shapes = [entry["shape"] for name, entry in json.loads(data[8 : 8 + length]).items() if name != "__metadata__"]
    total = 0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


class HubServer:
    """The server. Use it as a context; `endpoint` is its address."""

    def __init__(self, page: int = 100) -> None:
        self.repositories: dict[str, Stored] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.requests: list[Request] = []
        self.page = page
        self.released = threading.Event()  # set at the end: slow answers end then
        self.connections: set[socket.socket] = set()

    def __enter__(self) -> HubServer:
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        self.endpoint = f"http://127.0.0.1:{self.http.server_port}"
        self.cdn = f"http://localhost:{self.http.server_port}/cdn"
        return self

    def __exit__(self, *error: object) -> None:
        if not self.released.is_set():
            self.stop()

    def stop(self) -> None:
        """From now on connections are refused, and those that are open break."""
        self.released.set()
        self.http.shutdown()
        self.http.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def push(self, id: str, files: dict[str, bytes], **about: Any) -> str:
        """Add a commit to a repository, which it makes; the commit."""
        stored = self.repositories.setdefault(id, Stored(id))
        for name, value in about.items():
            setattr(stored, name, value)
        text = f"{id} {len(stored.commits)} {sorted((name, blob_id(data)) for name, data in files.items())}"
        commit = hashlib.sha1(text.encode()).hexdigest()
        stored.commits[commit] = files
        return commit

    def fail(self, id: str, kind: str, **how: Any) -> None:
        """Let a repository (or an author's list) misbehave: `slow`, `429`, `500`, `cut`, `short`, `drop`, `nonsense`."""
        self.faults.setdefault(id, []).append(Fault(kind, **how))

    def fault(self, request: Request) -> Fault | None:
        for fault in self.faults.get(request.id, ()):
            if fault.times != 0 and any(fnmatch.fnmatch(part, fault.on) for part in (request.what, request.name)):
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None

    def asked(self, what: str | None = None, id: str | None = None) -> list[str]:
        """Names of the files (or kinds of the requests) that were asked for, in order."""
        return [
            request.name or request.what
            for request in self.requests
            if what in (None, request.what) and id in (None, request.id)
        ]


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.hub.connections.add(self.connection)

    def finish(self) -> None:
        self.hub.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            super().handle()

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.handle_request()

    def do_GET(self) -> None:
        self.handle_request()

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        try:
            if path.startswith("/cdn/"):
                _, _, owner, name, commit, file = path.split("/", 5)
                request = Request(self.command, "cdn", f"{owner}/{name}", file, token)
            elif path == "/api/models":
                request = Request(self.command, "list", query["author"][0], token=token)
            elif path.startswith("/api/models/"):
                owner, name, *rest = path.removeprefix("/api/models/").split("/")
                kind, commit = (rest + ["info", "main"])[:2] if rest else ("info", "main")
                kind = {"revision": "info"}.get(kind, kind)
                request = Request(self.command, kind, f"{owner}/{name}", token=token)
            else:
                owner, name, resolve, commit, file = path.strip("/").split("/", 4)
                request = Request(self.command, "file", f"{owner}/{name}", file, token)
        except (ValueError, KeyError):
            return self.fail(404, "EntryNotFound")
        self.hub.requests.append(request)
        fault = self.hub.fault(request)
        if fault is not None and self.misbehave(fault):
            return None
        if request.what == "list":
            return self.list_models(query)
        return self.repository(request, commit, query, fault)

    def misbehave(self, fault: Fault) -> bool:
        if fault.kind in ("429", "500", "503"):
            headers = {"Retry-After": str(fault.retry_after)} if fault.kind == "429" else {}
            self.answer(int(fault.kind), b"", headers)
        elif fault.kind == "slow":
            self.hub.released.wait(30)
            self.close_connection = True
        elif fault.kind == "drop":
            self.close_connection = True
        elif fault.kind == "nonsense":
            self.answer(200, b"<html>please log in to the network</html>", {"Content-Type": "text/html"})
        else:
            return False
        return True

    def repository(self, request: Request, commit: str, query: dict[str, list[str]], fault: Fault | None) -> None:
        stored = self.hub.repositories.get(request.id)
        if stored is None:
            return self.fail(404 if request.token else 401, "RepoNotFound")
        commit = stored.main if commit == "main" else commit
        files = stored.commits.get(commit)
        if files is None:
            return self.fail(404, "RevisionNotFound")
        if request.what == "info":
            return self.json(about(stored, commit, sizes="blobs" in query, expand=()))
        if request.what == "tree":
            return self.json([{"type": "file", "path": name, **blob(name, data)} for name, data in files.items()])
        if request.what == "cdn":
            return self.data(files[request.name], fault)
        if stored.readers is not None and request.token not in stored.readers:
            return self.fail(403 if request.token else 401, "GatedRepo")
        headers = {"X-Repo-Commit": commit}
        if request.name not in files:
            return self.fail(404, "EntryNotFound", headers)
        data = files[request.name]
        if not request.name.endswith(LFS):
            return self.data(data, fault, headers | {"ETag": f'"{blob_id(data)}"'})
        place = f"{self.hub.cdn}/{request.id}/{commit}/{quote(request.name)}"
        headers |= {"Location": place, "X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{sha256(data)}"'}
        return self.answer(302, b"", headers)

    def list_models(self, query: dict[str, list[str]]) -> None:
        author, search = query["author"][0], query.get("search", [""])[0].lower()
        found = [
            stored
            for stored in sorted(self.hub.repositories.values(), key=lambda stored: -stored.downloads)
            if stored.id.startswith(f"{author}/")
            and search in stored.id.lower()
            and set(query.get("filter", ())) <= {*stored.tags, *kinds(stored)}
        ]
        start = int(query.get("cursor", ["0"])[0])
        size = min(self.hub.page, int(query.get("limit", ["100"])[0]))
        headers = {}
        if start + size < len(found):
            rest = "&".join(f"{key}={quote(v)}" for key, values in query.items() if key != "cursor" for v in values)
            headers["Link"] = f'<{self.hub.endpoint}/api/models?{rest}&cursor={start + size}>; rel="next"'
        listed = found[start : start + size]
        self.json([about(stored, stored.main, False, query.get("expand", ())) for stored in listed], headers)

    def data(self, data: bytes, fault: Fault | None, headers: dict[str, str] | None = None) -> None:
        """A file, from the first byte that is asked for; cut off in the middle, or half as long as it should be."""
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        kind, headers = fault.kind if fault else "", {"Accept-Ranges": "bytes"} | (headers or {})
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        sent = data[start : len(data) // 2] if kind in ("cut", "short") and self.command == "GET" else data[start:]
        claimed = len(data) - start if kind == "cut" or self.command == "HEAD" else len(sent)
        self.answer(206 if start else 200, sent, headers, claimed)
        if kind == "cut":
            self.close_connection = True

    def json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def fail(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": code} | (headers or {}))

    def answer(self, status: int, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client has gone


def kinds(stored: Stored) -> set[str]:
    """The tags that the Hub works out from the files."""
    endings = {PurePosixPath(name).suffix.lstrip(".") for name in stored.commits[stored.main]}
    return endings & {"safetensors", "gguf"}


def blob(name: str, data: bytes) -> dict[str, Any]:
    lfs = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
    return {"size": len(data), "oid": blob_id(data)} | ({"lfs": lfs} if name.endswith(LFS) else {})


def about(stored: Stored, commit: str, sizes: bool, expand: Any) -> dict[str, Any]:
    """What the Hub says of a repository. Lists have what is asked for; the configuration is always an extract."""
    files = stored.commits[commit]
    siblings = []
    for name, data in files.items():
        entry: dict[str, Any] = {"rfilename": name}
        if sizes:
            entry |= {"size": len(data), "blobId": blob_id(data)}
            if name.endswith(LFS):
                entry["lfs"] = {"size": len(data), "sha256": sha256(data), "pointerSize": 130}
        siblings.append(entry)
    try:
        whole = json.loads(files.get("config.json", b"{}"))
        extract = {key: whole[key] for key in ("architectures", "model_type", "quantization_config") if key in whole}
    except (ValueError, TypeError, RecursionError):
        extract = {}
    weights = [data for name, data in files.items() if name.endswith(".safetensors")]
    said: dict[str, Any] = {
        "sha": commit,
        "gated": "manual" if stored.readers is not None else False,
        "private": False,
        "downloads": stored.downloads,
        "tags": [*stored.tags, *sorted(kinds(stored))],
        "siblings": siblings,
        "config": extract,
    }
    if weights:
        try:
            count = sum(map(parameters, weights))
            said["safetensors"] = {"parameters": {"F32": count}, "total": count}
        except (ValueError, struct.error):
            pass
    kept = {key: value for key, value in said.items() if not expand or key in expand}
    return {"id": stored.id, "modelId": stored.id} | kept
