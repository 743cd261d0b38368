"""The models folder: what is installed, whether it is whole, and how a file gets its name.

A file has its final name only after its size, magic and digest were checked and it reached the
disk. Beside it lies a sidecar that says what was checked and when. For the file `m.gguf` the folder
holds

    m.gguf                       the model
    m.gguf.json                  its sidecar
    .m.gguf.lock, .lock.owner    who pulls it now
    .m.gguf.DIGEST.*             an unfinished pull of the file with that digest
"""

import datetime
import enum
import errno
import hashlib
import io
import json
import os
import re
import shutil
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from edge_agent.errors import ModelError, ModelFileError
from edge_agent.models.catalog import CatalogEntry
from edge_agent.models.locks import held_now
from edge_agent.models.sizes import file_sizes, size_of

GGUF_MAGIC: Final = b"GGUF"
DEFAULT_RESERVE_BYTES: Final = 512 * 1024 * 1024
_HASH_CHUNK_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What is known of an installed file.

    Attributes:
        size_bytes, mtime_ns: of the file when it was last hashed; while both hold, its digest is
            taken to hold as well.
        verified_time: when it was last hashed; wall time, UTC, ISO 8601; for people only.
        was_read_back: False until it was hashed once after its installation, by its first user,
            from the disk: a card that lost power may not hold what it was given.
        source: where the file came from, in words.
        derived_from_sha256: the digest of the file that the quantiser made it from, or None.
    """

    model: str
    size_bytes: int
    sha256: str
    mtime_ns: int
    verified_time: str
    was_read_back: bool
    source: str
    derived_from_sha256: str | None = None


class ModelPresence(enum.Enum):
    """What the models folder holds of one entry, without reading the file."""

    ABSENT = "absent"
    PARTIAL = "partial"
    UNVERIFIED = "unverified"
    DAMAGED = "damaged"
    INSTALLED = "installed"


@dataclass(frozen=True, slots=True)
class ModelState:
    """One entry as the folder has it; `size_bytes` is what is on the disk, 0 when absent."""

    presence: ModelPresence
    size_bytes: int
    sidecar: Sidecar | None


class ModelStore:
    """The models folder.

    Its methods read and write the disk and may take seconds; on an event loop call them in a
    thread. Two processes may use one folder: whoever changes a model's files holds its lock.
    """

    def __init__(self, folder: Path, reserve_bytes: int = DEFAULT_RESERVE_BYTES) -> None:
        """Use this folder, which need not exist yet.

        Args:
            folder: where the model files are.
            reserve_bytes: free space that a pull leaves to the rest of the machine.
        """
        self.folder = folder
        self.reserve_bytes = reserve_bytes

    def path_of(self, entry: CatalogEntry) -> Path:
        """Return where the entry's file is, or would be."""
        return self.folder / entry.file

    def lock_path(self, entry: CatalogEntry) -> Path:
        """Return the lock of the entry's files; see `locks.held`."""
        return self.folder / f".{entry.file}.lock"

    def unfinished_path(self, entry: CatalogEntry, suffix: str) -> Path:
        """Return where an unfinished pull keeps something.

        The digest is in the name, so that a pull never goes on with bytes of another version.
        """
        return self.folder / f".{entry.file}.{(entry.sha256 or 'derived')[:12]}.{suffix}"

    def prepare(self) -> None:
        """Make the folder.

        Raises:
            ModelError: it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(
                f"Cannot make the models folder {self.folder}: {error.strerror}. Check the owner"
                " and permissions of its parent, or choose another data folder."
            ) from error

    def state_of(self, entry: CatalogEntry) -> ModelState:
        """Say what the folder holds of this entry; looks at names and sizes only."""
        path = self.path_of(entry)
        try:
            status = path.stat()
        except OSError:
            partial = sum(_size_on_disk(left) for left in self._unfinished(entry))
            presence = ModelPresence.PARTIAL if partial else ModelPresence.ABSENT
            return ModelState(presence, partial, None)
        sidecar = _read_sidecar(path)
        expected_bytes = entry.size_bytes or (sidecar.size_bytes if sidecar else None)
        if expected_bytes is not None and status.st_size != expected_bytes:
            return ModelState(ModelPresence.DAMAGED, status.st_size, sidecar)
        if sidecar is None or not _still_holds(sidecar, entry, status):
            return ModelState(ModelPresence.UNVERIFIED, status.st_size, sidecar)
        return ModelState(ModelPresence.INSTALLED, status.st_size, sidecar)

    def ensure_verified(self, entry: CatalogEntry) -> Path:
        """Return the file once it is known to be what the entry says; call before every use.

        The first use reads the whole file back from the disk and hashes it; after that, size and
        modification time must be as they were then.

        Raises:
            ModelFileError: it is missing or not what the entry says.
        """
        state = self.state_of(entry)
        is_known = state.presence is ModelPresence.INSTALLED
        if is_known and state.sidecar is not None and state.sidecar.was_read_back:
            return self.path_of(entry)
        self.verify(entry)
        return self.path_of(entry)

    def verify(self, entry: CatalogEntry) -> Sidecar:
        """Read the whole file, compare it with the entry and note the result in the sidecar.

        Raises:
            ModelFileError: it is missing or not what the entry says. The file stays where it is.
        """
        path = self.path_of(entry)
        pull = f"`edge-agent models pull {entry.name}`"
        known = _read_sidecar(path)
        if not path.exists():
            raise ModelFileError(f"{entry.name} is not installed ({path}). Run {pull}.")
        expected_sha256 = entry.sha256 or (known.sha256 if known else None)
        if expected_sha256 is None:
            raise ModelFileError(
                f"{path} was not made by {pull}, so there is no digest to check it against. Move it"
                " away and run that."
            )
        expected_bytes = entry.size_bytes or (known.size_bytes if known else None)
        found = examine(path, expected_sha256, expected_bytes)
        if isinstance(found, FileFault):
            raise ModelFileError(f"{path} {found.problem}. It cannot be used: run {pull}.")
        sidecar = Sidecar(
            model=entry.name,
            size_bytes=found.size_bytes,
            sha256=found.sha256,
            mtime_ns=found.mtime_ns,
            verified_time=_utc_now(),
            was_read_back=True,
            source=known.source if known else "found in the models folder",
            derived_from_sha256=known.derived_from_sha256 if known else None,
        )
        with suppress(OSError):  # a folder that may only be read: the next start hashes again
            _write_sidecar(path, sidecar)
        return sidecar

    def require_space(self, entry: CatalogEntry, needed_bytes: int) -> None:
        """Make sure that a pull fits and leaves the reserve.

        A file system that does not tell its free space counts as having it.

        Raises:
            ModelError: it does not fit; the text says how much is missing.
        """
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:
            return
        missing = needed_bytes + self.reserve_bytes - free
        if missing > 0:
            raise ModelError(
                f"{entry.name} needs {in_megabytes(needed_bytes)} in {self.folder} beside the"
                f" reserve of {in_megabytes(self.reserve_bytes)}; {in_megabytes(free)} are free."
                f" Free {in_megabytes(missing)}, for example with `edge-agent models remove NAME`,"
                " or use a data folder on another disk."
            )

    def install(
        self,
        entry: CatalogEntry,
        unfinished: Path,
        found: "Examined",
        source: str,
        derived_from_sha256: str | None = None,
    ) -> Path:
        """Give a complete file its final name; the caller holds the lock.

        Losing power at any point leaves the old state or the new one: the file reached the disk
        before it was examined, and the rename is made to last before anyone hears of it.

        Args:
            entry: what the file is.
            unfinished: the file; in the models folder.
            found: what `examine` found in it.
            source: where it came from, in words.
            derived_from_sha256: of the file that it was quantised from.

        Raises:
            OSError: the folder cannot be written.
        """
        path = self.path_of(entry)
        # The sidecar goes first: one without its file says nothing, and beside an older file its
        # size and time do not match, so that one gets hashed.
        _write_sidecar(
            path,
            Sidecar(
                model=entry.name,
                size_bytes=found.size_bytes,
                sha256=found.sha256,
                mtime_ns=found.mtime_ns,
                verified_time=_utc_now(),
                was_read_back=False,
                source=source,
                derived_from_sha256=derived_from_sha256,
            ),
        )
        unfinished.replace(path)
        _sync_folder(self.folder)
        self.discard_unfinished(entry)
        return path

    def discard_unfinished(self, entry: CatalogEntry, keep: str | None = None) -> int:
        """Remove what unfinished pulls of this file left; the caller holds the lock.

        Args:
            entry: whose.
            keep: only remove that of other digests than this one's; None removes all.

        Returns:
            The bytes removed.
        """
        removed = 0
        for left in self._unfinished(entry):
            if keep is not None and left.name.startswith(f".{entry.file}.{keep[:12]}."):
                continue
            removed += _size_on_disk(left)
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
        return removed

    def remove(self, entry: CatalogEntry) -> int:
        """Remove the file, its sidecar and what unfinished pulls left.

        An engine that runs the model keeps it until it ends.

        Returns:
            The bytes freed; 0 when there was nothing.

        Raises:
            ModelError: the model is being pulled now, or the folder cannot be written.
        """
        if not self.folder.is_dir():
            return 0
        path = self.path_of(entry)
        with held_now(self.lock_path(entry), f"the files of {entry.name}"):
            try:
                freed = _size_on_disk(path)
                path.unlink(missing_ok=True)
                _sidecar_path(path).unlink(missing_ok=True)
                freed += self.discard_unfinished(entry)
            except OSError as error:
                raise ModelError(
                    f"Cannot remove {path}: {error.strerror}. Check the folder's permissions."
                ) from error
            _sync_folder(self.folder)
        return freed

    def _unfinished(self, entry: CatalogEntry) -> list[Path]:
        pattern = re.compile(rf"\.{re.escape(entry.file)}\.([0-9a-f]{{12}}|derived|json)\..+")
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:
            return []
        return [self.folder / name for name in names if pattern.fullmatch(name)]


@dataclass(frozen=True, slots=True)
class Examined:
    """What a sound file is: `sha256` in lower-case hexadecimal digits."""

    size_bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileFault:
    """What is wrong with a file: a predicate, such as "has 3 bytes instead of 5"."""

    problem: str


def examine(
    path: Path,
    sha256: str | None,
    size_bytes: int | None,
    stop: threading.Event | None = None,
) -> Examined | FileFault:
    """Bring a file to the disk, read it back from there and compare it with what is expected.

    Args:
        path: the file.
        sha256: its expected digest; None accepts any.
        size_bytes: its expected size; None accepts any.
        stop: ends the reading early when set from another thread; the result means nothing then.
    """
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if size_bytes is not None and status.st_size != size_bytes:
                return FileFault(f"has {status.st_size} bytes instead of {size_bytes}")
            magic = file.read(len(GGUF_MAGIC))
            if magic != GGUF_MAGIC:
                return FileFault(f"is no GGUF file: it begins with {magic!r}")
            file.seek(0)
            _sync(file.fileno())
            actual = _sha256(file, stop)
    except OSError as error:
        return FileFault(f"cannot be read: {error.strerror}")
    if sha256 is not None and actual != sha256:
        return FileFault(f"has the SHA-256 {actual} instead of {sha256}")
    return Examined(status.st_size, status.st_mtime_ns, actual)


def _sha256(file: io.FileIO, stop: threading.Event | None) -> str:
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # some file systems do not know it
            # What the disk holds is of interest, not what memory still remembers of it.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_HASH_CHUNK_BYTES))
    while read := file.readinto(buffer):
        digest.update(buffer[:read])
        if stop is not None and stop.is_set():
            break
    return digest.hexdigest()


def in_megabytes(size_bytes: int) -> str:
    """Return a size for people, such as "98.4 MB"."""
    if size_bytes >= 1_000_000_000:
        return f"{size_bytes / 1e9:.2f} GB"
    return f"{size_bytes / 1e6:.1f} MB"


def _still_holds(sidecar: Sidecar, entry: CatalogEntry, status: os.stat_result) -> bool:
    return (
        sidecar.size_bytes == status.st_size
        and sidecar.mtime_ns == status.st_mtime_ns
        and entry.sha256 in (None, sidecar.sha256)
    )


def _sidecar_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _read_sidecar(path: Path) -> Sidecar | None:
    """Read what is known of a file; an unreadable or foreign sidecar says nothing."""
    try:
        read = json.loads(_sidecar_path(path).read_text(encoding="utf-8"))
        sidecar = Sidecar(**{name: read[name] for name in Sidecar.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_sound = isinstance(sidecar.sha256, str) and len(sidecar.sha256) == 64
    return sidecar if is_sound and isinstance(sidecar.size_bytes, int) else None


def _write_sidecar(path: Path, sidecar: Sidecar) -> None:
    target = _sidecar_path(path)
    fresh = target.with_name(f".{target.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(sidecar), indent=2) + "\n")
        file.flush()
        _sync(file.fileno())
    fresh.replace(target)


def _sync(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        # Read-only disks have nothing to bring there, and some network file systems know no
        # fsync; anything else means that the bytes did not arrive.
        if error.errno not in (errno.EROFS, errno.EINVAL, errno.ENOTSUP):
            raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _sync(handle)
    finally:
        os.close(handle)


def _size_on_disk(path: Path) -> int:
    if path.is_dir():
        return sum(file_sizes(path))
    return size_of(path)


def _utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
