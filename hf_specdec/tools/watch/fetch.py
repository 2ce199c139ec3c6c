"""One bounded HTTP GET, with one clear line for everything that can go wrong. Only http and https."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import IO, Any

from ...errors import SpecDecError


MOST_BYTES = 16 * 2**20
TIMEOUT = 5.0  # seconds for the whole answer
KEY_VARIABLE = "HF_SPECDEC_API_KEY"
SHORT = 80  # characters of an answer that a message shows


class FetchError(SpecDecError):
    """A server gave no answer that can be used.

    Attributes:
        status: The HTTP status, or `None` where there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def check_url(url: str) -> str:
    """The URL of a server, without a slash at its end.

    Raises:
        SpecDecError: If it isn't a plain http or https URL.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        known = known and url.isprintable() and " " not in url
    except ValueError:
        known = False
    if not known:
        raise SpecDecError(f"The URL must be that of a server, such as http://localhost:8000; got {url!r}.")
    if parts.username is not None or parts.password is not None:
        raise SpecDecError(f"The URL must not hold a password. Put a key into the variable {KEY_VARIABLE}.")
    return url.rstrip("/")


def at(url: str, path: str) -> str:
    """The address of `path` on a server; `/metrics` and `/v1` at the end of the server's URL are left out, a query stays."""
    parts = urllib.parse.urlsplit(url)
    base = parts.path.rstrip("/")
    for ending in ("/metrics", "/v1"):
        base = base.removesuffix(ending)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, base + path, parts.query, ""))


def fetch(url: str, *, timeout: float = TIMEOUT, key: str | None = None) -> str:
    """The text at an address.

    Args:
        url: http or https.
        timeout: Seconds for the whole answer.
        key: Sent as a bearer token. It goes to the same host alone, redirections included.

    Raises:
        FetchError: If there is no answer, an error status, or one that is no text or too large.
    """
    headers = {"User-Agent": "hf-specdec", "Accept": "text/plain, application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    deadline = time.monotonic() + timeout
    opener = urllib.request.build_opener(_SameHost())
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
            data = _read(response, url, deadline, timeout)
            left_over = response.length if isinstance(response, http.client.HTTPResponse) else 0
    except urllib.error.HTTPError as error:
        raise FetchError(_status_line(url, error.code), error.code) from error
    except (TimeoutError, urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        if isinstance(error, FetchError):
            raise
        raise FetchError(_failure_line(url, error, timeout)) from error
    if left_over:
        raise FetchError(f"{url} broke off in the middle of its answer. Try again.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FetchError(f"{url} answers with something that is no text. Is it the right address?") from error


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows redirections to the same host alone: a key must not go elsewhere, nor the question to a file."""

    max_redirections = 3

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        downgraded = old.scheme == "https" and new.scheme != "https"
        if new.scheme not in ("http", "https") or new.hostname != old.hostname or downgraded:
            raise FetchError(
                f"{req.full_url} redirects to {newurl[:SHORT]!r}. Give that address if you trust it.", code
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _read(response: Any, url: str, deadline: float, timeout: float) -> bytes:
    parts, size = [], 0
    while part := response.read1(2**16):
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise FetchError(f"{url} answers with more than {MOST_BYTES // 2**20} MiB: these are no metrics.")
        if time.monotonic() > deadline:
            raise TimeoutError(timeout)
    return b"".join(parts)


def _status_line(url: str, status: int) -> str:
    if status in (401, 403):
        return f"{url} asks for a key (HTTP {status}). Put it into the variable {KEY_VARIABLE}."
    if status in (301, 302, 303, 307, 308):
        return f"{url} redirects in a circle, or to what is no web address (HTTP {status})."
    if status == 404:
        return f"{url} isn't there (HTTP 404)."
    return f"{url} answers with an error (HTTP {status})."


def _failure_line(url: str, error: Exception, timeout: float) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return f"{url} didn't answer within {timeout:g} s. Is it busy, or the wrong port?"
    if isinstance(reason, ConnectionRefusedError):
        return f"Nothing listens at {url} (connection refused). Is the server up, and is the port right?"
    if isinstance(reason, socket.gaierror):
        return f"The host of {url} isn't known. Is its name right?"
    if isinstance(reason, ssl.SSLError):
        return f"{url} can't be reached over https: {reason.reason or reason}."
    if isinstance(reason, http.client.IncompleteRead | http.client.RemoteDisconnected | ConnectionResetError):
        return f"{url} broke off in the middle of its answer. Try again."
    if isinstance(reason, http.client.HTTPException):
        return f"{url} doesn't answer as HTTP does ({type(reason).__name__}). Is it the right port?"
    return f"{url} can't be read: {reason}."
