"""One file over HTTP, resumed where an earlier try or an earlier run stopped.

What arrives is appended to a partial file. A later request asks for the rest of it (RFC 9110,
section 14) on condition that the file is still the same (`If-Range`); a server that knows no
ranges, or has another file by now, sends all of it and the partial file starts again. Whether the
bytes are the right ones is for the caller to check.
"""

import contextlib
import io
import json
import os
import random
import re
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from edge_agent.models.sizes import size_of
from edge_agent.models.store import GGUF_MAGIC

if TYPE_CHECKING:
    import httpx

_WRITE_BYTES: Final = 1024 * 1024
_MOST_TRIES: Final = 100
_LONGEST_RETRY_AFTER_SECONDS: Final = 30.0
_TRY_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_WEB_PAGES: Final = ("text/html", "application/xhtml+xml", "application/json", "multipart/")


class SourceError(Exception):
    """One source did not give the file; the text says why and goes into a list of such."""


class _WrongFileError(SourceError):
    """What arrives is not the file; what arrived is worth nothing."""


class _PassingError(Exception):
    """A try failed in a way that another try may not."""

    def __init__(self, reason: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """How patient a download is.

    Attributes:
        connect_seconds: to have a connection.
        stall_seconds: from one byte to the next.
        tries: in a row that gain no byte; one that gains some starts the count again.
        backoff_base_seconds, backoff_cap_seconds: before the n-th further try it waits between 0
            and min(cap, base * 2^n) seconds, evenly drawn ("full jitter").
    """

    connect_seconds: float = 10.0
    stall_seconds: float = 30.0
    tries: int = 4
    backoff_base_seconds: float = 0.5
    backoff_cap_seconds: float = 15.0


@dataclass(frozen=True, slots=True)
class Download:
    """What to get and where to put it.

    Attributes:
        target: the partial file; whatever it holds already is taken as the file's beginning.
        size_bytes: of the whole file.
        headers: for the first host only; a redirect elsewhere does not carry `Authorization`.
    """

    url: str
    target: Path
    size_bytes: int
    headers: Mapping[str, str]


async def download(
    wanted: Download,
    limits: DownloadLimits,
    rng: random.Random,
    on_bytes: Callable[[int], None],
    on_retry: Callable[[str], None],
) -> None:
    """Fill the target to its full size; what it holds after a failure is good to resume from.

    Args:
        wanted: what to get.
        limits: how patient to be.
        rng: draws the waits between tries.
        on_bytes: called with the size of the target so far, many times a second at most.
        on_retry: called with the reason before each further try.

    Raises:
        SourceError: the address does not give the file.
        OSError: the target cannot be written.
    """
    import httpx  # costs 150 ms that an agent with its models in place need not pay

    timeout = httpx.Timeout(limits.stall_seconds, connect=limits.connect_seconds)
    failures = 0
    async with httpx.AsyncClient(timeout=timeout, follow_redirects=True, max_redirects=8) as client:
        for _ in range(_MOST_TRIES):
            before = size_of(wanted.target)
            try:
                await _try_once(client, wanted, on_bytes)
            except _PassingError as error:
                gained = size_of(wanted.target) > before
                failures = 1 if gained else failures + 1
                if failures >= limits.tries:
                    raise SourceError(f"{error} (tried {failures} times)") from error
                ceiling = limits.backoff_base_seconds * 2 ** (failures - 1)
                wait = rng.uniform(0, min(limits.backoff_cap_seconds, ceiling))
                on_retry(str(error))
                await anyio.sleep(max(wait, error.retry_after_seconds))
            else:
                return
    raise SourceError(f"the connection broke {_MOST_TRIES} times")


async def _try_once(
    client: "httpx.AsyncClient", wanted: Download, on_bytes: Callable[[int], None]
) -> None:
    import httpx

    have = size_of(wanted.target)
    if have > wanted.size_bytes:
        discard(wanted.target)
        have = 0
    if have == wanted.size_bytes:
        return
    headers = {"Accept-Encoding": "identity", "User-Agent": "pointsman", **wanted.headers}
    if have:
        headers["Range"] = f"bytes={have}-"
        validator = _validator(wanted)
        if validator:
            headers["If-Range"] = validator
    try:
        async with client.stream("GET", wanted.url, headers=headers) as response:
            have = _accept(response, wanted, have)
            _remember_validator(response, wanted)
            await _append(response, wanted, have, on_bytes)
    except _WrongFileError:
        discard(wanted.target)
        raise
    except httpx.TimeoutException as error:
        kind = "no connection" if isinstance(error, httpx.ConnectTimeout) else "no byte"
        patience = client.timeout.connect if kind == "no connection" else client.timeout.read
        raise _PassingError(f"{_host(wanted.url)}: {kind} within {patience:g} s") from error
    except httpx.TransportError as error:
        raise _PassingError(f"{_host(wanted.url)}: {_in_words(error)}") from error
    except (httpx.RequestError, httpx.InvalidURL) as error:
        raise SourceError(f"{_host(wanted.url)}: {_in_words(error)}") from error
    if size_of(wanted.target) < wanted.size_bytes:
        raise _PassingError("the connection ended before the file did")


def _accept(response: "httpx.Response", wanted: Download, have: int) -> int:
    """Judge the head of an answer.

    Returns:
        How many bytes of the target it goes on from.
    """
    status = response.status_code
    if status == 416:
        # The server's file ends before ours goes on: what we have is not its beginning.
        total = _total(response)
        discard(wanted.target)
        if total is not None and total != wanted.size_bytes:
            raise SourceError(_other_file(total, wanted))
        raise _PassingError("the server refused to go on from where we were (416)")
    if status in _TRY_AGAIN:
        raise _PassingError(f"the server answered {status}", _retry_after(response))
    if status not in (200, 206):
        raise SourceError(_refusal(status))
    content_type = response.headers.get("Content-Type", "").lower()
    if content_type.startswith(_WEB_PAGES):
        raise SourceError(
            f"the server sent {content_type.split(';')[0]} instead of a model file, as login pages"
            " and proxies do"
        )
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise SourceError("the server compresses the file although it was asked not to")
    if status == 206:
        start = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
        if start is None or int(start[1]) != have:
            discard(wanted.target)
            raise _PassingError("the server went on from another place than asked")
        total = _total(response)
    else:
        if have:
            discard(wanted.target)
            have = 0
        length = response.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else None
    if total is not None and total != wanted.size_bytes:
        raise SourceError(_other_file(total, wanted))
    return have


async def _append(
    response: "httpx.Response", wanted: Download, have: int, on_bytes: Callable[[int], None]
) -> None:
    pending = bytearray()
    async with _appending(wanted.target) as file:
        try:
            async for chunk in response.aiter_raw():
                pending += chunk
                arrived = have + len(pending)
                magic = bytes(pending[: len(GGUF_MAGIC)])
                if have == 0 and arrived >= len(GGUF_MAGIC) and magic != GGUF_MAGIC:
                    raise _WrongFileError(f"it sends no GGUF file: it begins with {magic!r}")
                if arrived > wanted.size_bytes:
                    raise _WrongFileError(
                        f"it sends more than the {wanted.size_bytes} bytes expected"
                    )
                on_bytes(arrived)
                if len(pending) >= _WRITE_BYTES:
                    await anyio.to_thread.run_sync(_write, file, bytes(pending))
                    have = arrived
                    pending.clear()
        finally:
            # Whatever ended it, what has arrived need not be sent again.
            _write(file, bytes(pending))


def _write(file: io.FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:  # an unbuffered file may take less than all of it
        left = left[file.write(left) :]


@contextlib.asynccontextmanager
async def _appending(path: Path) -> AsyncIterator[io.FileIO]:
    # Unbuffered: what was written survives however this process ends.
    file = await anyio.to_thread.run_sync(io.FileIO, path, "ab")
    try:
        yield file
    finally:
        file.close()


def discard(target: Path) -> None:
    """Remove a partial file and what is remembered of it."""
    target.unlink(missing_ok=True)
    _memory_path(target).unlink(missing_ok=True)


def _memory_path(target: Path) -> Path:
    return target.with_name(target.name + ".http")


def _validator(wanted: Download) -> str | None:
    """Return the ETag that the partial file was begun with, when it came from the same address."""
    try:
        read = json.loads(_memory_path(wanted.target).read_text(encoding="utf-8"))
        return str(read["etag"]) if read["url"] == wanted.url else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember_validator(response: "httpx.Response", wanted: Download) -> None:
    """Note the ETag for `If-Range`, which takes strong ones only (RFC 9110, section 13.1.5)."""
    etag = response.headers.get("ETag", "")
    path = _memory_path(wanted.target)
    if not etag.startswith('"'):
        path.unlink(missing_ok=True)
        return
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps({"url": wanted.url, "etag": etag}), encoding="utf-8")
    os.replace(fresh, path)


def _total(response: "httpx.Response") -> int | None:
    found = re.fullmatch(r"bytes (?:\*|\d+-\d+)/(\d+)", response.headers.get("Content-Range", ""))
    return int(found[1]) if found else None


def _retry_after(response: "httpx.Response") -> float:
    value = response.headers.get("Retry-After", "")
    return min(float(value), _LONGEST_RETRY_AFTER_SECONDS) if value.isdecimal() else 0.0


def _other_file(total: int, wanted: Download) -> str:
    return f"the server's file has {total} bytes, the catalogue says {wanted.size_bytes}"


def _refusal(status: int) -> str:
    if status in (401, 403):
        return f"the server refuses access ({status}); for a gated hub repository set HF_TOKEN"
    if status in (404, 410):
        return f"the server has no such file ({status})"
    return f"the server answered {status}"


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).hostname or url


def _in_words(error: Exception) -> str:
    return str(error) or type(error).__name__
