"""Fitted parameters and policies as folders that load safely.

An artifact is a folder of arrays (npz without pickles) and texts beside a `manifest.json` with the
schema, the kind, the SHA-256 of every file and where the data came from. Nothing in it is code.
"""

import hashlib
import io
import json
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controller.storage.digests import file_digest

SCHEMA_VERSION: Final = 1

MANIFEST: Final = "manifest.json"
"""Has the digest of every other file, so its own digest names an artifact."""

_ARRAYS: Final = "arrays.npz"
_TEXT_SUFFIX: Final = ".txt"


class ArtifactError(Exception):
    """An artifact is missing, altered, of another kind or version; the text says what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """What a folder holds.

    Attributes:
        kind: what it is for, such as "drlm-predictors".
        arrays: by name; none of dtype object.
        texts: by name.
        details: plain values of the maker's, such as names of classes.
        provenance: where it comes from: files with their hashes, rows, command, figures.
        made_time: Unix seconds.
    """

    kind: str
    arrays: Mapping[str, NDArray[Any]]
    texts: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    made_time: float = 0.0


def save_artifact(folder: Path, artifact: Artifact) -> None:
    """Write an artifact; one that is there is replaced as a whole or not at all.

    Raises:
        ArtifactError: an array holds objects, or the folder cannot be written.
    """
    for name, array in artifact.arrays.items():
        if array.dtype.hasobject:
            raise ArtifactError(f"array {name!r} holds Python objects, which would need a pickle")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _write(fresh, artifact)
            fresh.chmod(0o755)
            _exchange(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise ArtifactError(f"{folder} cannot be written: {error.strerror or error}") from error


def load_artifact(folder: Path, kind: str) -> Artifact:
    """Read an artifact after checking every file against its manifest.

    One that another process saves meanwhile is read again, so that it comes whole: as it was or as
    it is now.

    Raises:
        ArtifactError: it is missing, altered, of another kind or of a version unknown here.
    """
    while True:
        manifest = _manifest(folder, kind)
        try:
            return _read(folder, kind, manifest)
        except ArtifactError:
            if _manifest(folder, kind) == manifest:
                raise


def _manifest(folder: Path, kind: str) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{folder} holds no {MANIFEST}; make it again") from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{folder / MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ArtifactError(f"{folder / MANIFEST} is no manifest; make the artifact again")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise ArtifactError(
            f"{folder} has schema {manifest.get('schema_version')}, this version reads "
            f"{SCHEMA_VERSION}; make it again, or update"
        )
    if manifest.get("kind") != kind:
        raise ArtifactError(f"{folder} holds {manifest.get('kind')!r}, not {kind!r}")
    return manifest


def _read(folder: Path, kind: str, manifest: Mapping[str, Any]) -> Artifact:
    contents: dict[str, bytes] = {}
    for name, digest in manifest["files"].items():
        if Path(name).name != name:
            raise ArtifactError(f"{folder / MANIFEST} names {name!r}, which is no plain name")
        try:
            contents[name] = (folder / name).read_bytes()
        except OSError as error:
            raise ArtifactError(f"{folder / name}: {error.strerror or error}") from error
        if hashlib.sha256(contents[name]).hexdigest() != digest:
            raise ArtifactError(
                f"{folder / name} is not the file that was saved; get or make the artifact again"
            )
    return Artifact(
        kind,
        _arrays(folder / _ARRAYS, contents[_ARRAYS]) if _ARRAYS in contents else {},
        {
            name.removesuffix(_TEXT_SUFFIX): text.decode("utf-8")
            for name, text in contents.items()
            if name.endswith(_TEXT_SUFFIX)
        },
        manifest.get("details", {}),
        manifest.get("provenance", {}),
        float(manifest.get("made_time", 0.0)),
    )


def _write(folder: Path, artifact: Artifact) -> None:
    np.savez(folder / _ARRAYS, allow_pickle=False, **dict(artifact.arrays))
    for name, text in artifact.texts.items():
        (folder / f"{name}{_TEXT_SUFFIX}").write_text(text, encoding="utf-8")
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "kind": artifact.kind,
        "made_time": artifact.made_time or time.time(),
        "files": {path.name: file_digest(path) for path in sorted(folder.iterdir())},
        "details": dict(artifact.details),
        "provenance": dict(artifact.provenance),
    }
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def _exchange(fresh: Path, folder: Path) -> None:
    """Put a new folder in the place of an old one."""
    if not folder.exists():
        fresh.rename(folder)
        return
    aside = fresh.with_name(f"{fresh.name}-old")
    folder.rename(aside)
    try:
        fresh.rename(folder)
    except OSError:
        aside.rename(folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _arrays(path: Path, content: bytes) -> dict[str, NDArray[Any]]:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error
