"""Getting a model of the catalogue into the models folder.

One process at a time pulls a file; others wait and then find it there. The sources are tried in
order until one gives a file of the right size, magic and digest. A derived model is made from the
one it derives from, which is pulled first.
"""

import asyncio
import os
import random
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio.to_thread

from edge_agent.errors import ModelError, ModelFileError, SourcesFailedError
from edge_agent.models.catalog import Catalog, CatalogEntry, Source
from edge_agent.models.download import SourceError
from edge_agent.models.locks import LockLimits, held
from edge_agent.models.progress import OnProgress, PullProgress, PullStage, ignore_progress
from edge_agent.models.sizes import file_sizes, size_of
from edge_agent.models.sources import Fetch, FetchSettings, fetch, needed_bytes
from edge_agent.models.stoppable import run_stoppable
from edge_agent.models.store import (
    Examined,
    FileFault,
    ModelPresence,
    ModelStore,
    examine,
    in_megabytes,
)

_LOOK_SECONDS: Final = 0.5

Quantiser = Callable[[Path, Path, str, int], Awaitable[None]]
"""Makes the second file from the first: source, target, quantisation, threads."""


@dataclass(frozen=True, slots=True)
class PullSettings:
    """How a pull goes about its work; `threads` are the quantiser's, None takes every core."""

    fetch: FetchSettings = field(default_factory=FetchSettings)
    lock: LockLimits = field(default_factory=LockLimits)
    threads: int | None = None


async def pull(
    entry: CatalogEntry,
    store: ModelStore,
    catalog: Catalog,
    *,
    settings: PullSettings | None = None,
    on_progress: OnProgress = ignore_progress,
    quantiser: Quantiser | None = None,
    rng: random.Random | None = None,
) -> Path:
    """Return the model's file, whole and verified; get it first when it is not there.

    Cancelling it keeps what has arrived, for the next pull to go on from.

    Args:
        entry: which model.
        store: where to.
        catalog: where a derived entry finds the one it is made from.
        settings: deadlines and such; None takes the defaults.
        on_progress: told what happens.
        quantiser: makes derived models; None takes llama.cpp's.
        rng: draws the waits between tries.

    Raises:
        SourcesFailedError: no source gave the file; lists each with its reason.
        ModelFileError: the quantiser made no usable file.
        ModelError: the disk is too full or cannot be written, or another pull does not end.
        EngineError: the quantiser failed.
    """
    work = _Pull(
        store,
        catalog,
        settings or PullSettings(),
        on_progress,
        quantiser or _llama_quantiser,
        rng or random.Random(),
    )
    return await work.bring(entry)


@dataclass(frozen=True, slots=True)
class _Pull:
    store: ModelStore
    catalog: Catalog
    settings: PullSettings
    on_progress: OnProgress
    quantiser: Quantiser
    rng: random.Random

    async def bring(self, entry: CatalogEntry) -> Path:
        path = self.store.path_of(entry)
        if self._is_installed(entry):
            self._tell(entry, PullStage.DONE, "already installed")
            return path
        self.store.prepare()
        what = f"the pull of {entry.name}"

        def waiting(owner: str) -> None:
            self._tell(entry, PullStage.WAITING, f"{owner} is pulling it; waiting for that")

        try:
            async with held(self.store.lock_path(entry), what, self.settings.lock, waiting):
                if self._is_installed(entry) or await self._adopt(entry):
                    self._tell(entry, PullStage.DONE, "already installed")
                    return path
                self.store.discard_unfinished(entry, keep=entry.sha256)
                base = self.catalog.base_of(entry)
                if base is None:
                    await self._fetch(entry)
                else:
                    await self._derive(entry, base)
        except OSError as error:
            raise ModelError(
                f"Cannot write {entry.name} to {self.store.folder}: {error.strerror or error}."
                " Check the free space, the owner and the permissions of the folder."
            ) from error
        self._tell(entry, PullStage.DONE, f"installed as {path}")
        return path

    def _is_installed(self, entry: CatalogEntry) -> bool:
        state = self.store.state_of(entry)
        if state.presence is not ModelPresence.INSTALLED or state.sidecar is None:
            return False
        base = self.catalog.base_of(entry)
        # A derived file is out of date when what it was made from has been replaced since.
        return base is None or state.sidecar.derived_from_sha256 == base.sha256

    async def _adopt(self, entry: CatalogEntry) -> bool:
        """Take a file that is there already, however it came there, if it is the right one."""
        if self.store.state_of(entry).presence is not ModelPresence.UNVERIFIED:
            return False
        self._tell(entry, PullStage.VERIFYING, "a file of this name is there already")
        try:
            await anyio.to_thread.run_sync(self.store.verify, entry)
        except ModelFileError as error:
            self._tell(entry, PullStage.RETRYING, f"replacing it: {error}")
            return False
        return self._is_installed(entry)

    async def _fetch(self, entry: CatalogEntry) -> None:
        if entry.size_bytes is None:
            raise AssertionError(f"{entry.name} has sources but no size")
        wanted = Fetch(
            model=entry.name,
            size_bytes=entry.size_bytes,
            target=self.store.unfinished_path(entry, "part"),
            parts_folder=self.store.unfinished_path(entry, "parts"),
            settings=self.settings.fetch,
            rng=self.rng,
            on_progress=self.on_progress,
        )
        arrived = size_of(wanted.target)
        self.store.require_space(entry, entry.size_bytes - min(arrived, entry.size_bytes))
        failures: list[str] = []
        for source in entry.sources:
            try:
                found = await self._try_source(entry, source, wanted)
            except (SourceError, ModelError) as error:
                failures.append(f"{source.describe()}: {error}")
                self._tell(entry, PullStage.SOURCE_FAILED, failures[-1])
                continue
            await anyio.to_thread.run_sync(
                self.store.install, entry, wanted.target, found, source.describe()
            )
            return
        listed = "\n".join(f"  {number}. {text}" for number, text in enumerate(failures, 1))
        raise SourcesFailedError(
            f"No source gave {entry.name}:\n{listed}\n"
            "Nothing was installed. Check the network and try again (what has arrived is kept); or"
            f" put the file on this machine and give the entry a source `local: PATH` in a"
            " catalogue of your own. A wrong size or SHA-256 means another or a damaged file:"
            " correct the catalogue only if you trust the new one."
        )

    async def _try_source(self, entry: CatalogEntry, source: Source, wanted: Fetch) -> Examined:
        """Fetch from one source until the file is right.

        Raises:
            SourceError: it does not give the right file.
            ModelError: it needs more disk than there is.
        """
        self.store.require_space(entry, needed_bytes(source, wanted.size_bytes) - _on_disk(wanted))
        while True:
            had_leftovers = wanted.has_leftovers()
            await fetch(source, wanted)
            self._tell(entry, PullStage.VERIFYING, in_megabytes(wanted.size_bytes))
            found = await run_stoppable(
                lambda stop: examine(wanted.target, entry.sha256, entry.size_bytes, stop)
            )
            if isinstance(found, Examined):
                return found
            wanted.discard()
            if not had_leftovers:
                raise SourceError(f"the file it gave {found.problem}")
            # Not this source's fault: a machine that lost power can leave bytes that never
            # reached the disk, and an earlier source may have begun another file.
            self._tell(entry, PullStage.RETRYING, "an earlier pull left bad bytes; starting again")

    async def _derive(self, entry: CatalogEntry, base: CatalogEntry) -> None:
        base_path = await self.bring(base)
        await anyio.to_thread.run_sync(self.store.ensure_verified, base)
        estimate = _derived_bytes(entry)
        self.store.require_space(entry, estimate)
        folder = self.store.unfinished_path(entry, "making")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        target = folder / entry.file
        threads = self.settings.threads or os.cpu_count() or 1
        text = f"to {entry.quantisation} from {base.name}"
        making = asyncio.ensure_future(
            self.quantiser(base_path, target, entry.quantisation, threads)
        )
        try:
            while not making.done():
                written = max(file_sizes(folder), default=0)
                self.on_progress(
                    PullProgress(
                        entry.name, PullStage.QUANTISING, text, min(written, estimate), estimate
                    )
                )
                await asyncio.wait({making}, timeout=_LOOK_SECONDS)
            await making
        except BaseException:
            making.cancel()
            await asyncio.wait({making})
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._tell(entry, PullStage.VERIFYING, "what the quantiser made")
        found = await run_stoppable(lambda stop: examine(target, None, None, stop))
        if isinstance(found, FileFault):
            shutil.rmtree(folder, ignore_errors=True)
            raise ModelFileError(
                f"What the quantiser made of {base.name} {found.problem}. Try again; if it happens"
                " again, the installed llama.cpp cannot quantise this model."
            )
        await anyio.to_thread.run_sync(
            self.store.install, entry, target, found, f"quantised {text}", base.sha256
        )

    def _tell(self, entry: CatalogEntry, stage: PullStage, text: str) -> None:
        self.on_progress(PullProgress(entry.name, stage, text))


def _on_disk(wanted: Fetch) -> int:
    return sum(map(size_of, (wanted.target, *wanted.parts_folder.glob("*.part"))))


def _derived_bytes(entry: CatalogEntry) -> int:
    """Estimate a derived file from its quantisation's bits: the digits in its name.

    One bit a weight is added for the scales, and a tenth for the tensors kept finer.
    """
    digits = "".join(c for c in entry.quantisation.split("_")[0] if c.isdigit())
    bits = int(digits) + 1 if digits else 16
    return int(entry.parameters_billions * 1e9 * bits / 8 * 1.1)


async def _llama_quantiser(source: Path, target: Path, quantisation: str, threads: int) -> None:
    from edge_agent.engine.llama.quantise import quantise  # brings in what only this needs

    await quantise(source, target, quantisation, threads)
