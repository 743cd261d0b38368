"""Folders of fitted parameters: named files, their hashes, and where they came from.

A folder has `manifest.json` beside its data files. Data are NumPy arrays without pickled objects,
LightGBM's text and JSON, so that loading a folder of unknown origin runs none of its code.
"""

import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MANIFEST_FILE: Final = "manifest.json"
SCHEMA_VERSION: Final = 1
_MOST_BYTES: Final = 1 << 30


class ArtifactError(Exception):
    """A folder of fitted parameters cannot be used; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A folder that was read and found whole.

    Attributes:
        kind: what it is for: "predictors", "ppo-policy", ...
        provenance: source files with hashes, rows, date, command.
        metrics: held-out figures, as they were when it was made.
        contents: bytes of each data file by name; their hashes agreed.
    """

    kind: str
    provenance: dict[str, Any]
    metrics: dict[str, Any]
    contents: dict[str, bytes]

    def arrays(self, name: str) -> dict[str, NDArray[Any]]:
        """The arrays of an .npz file.

        Raises:
            ArtifactError: there is no such file, or it is none without pickled objects.
        """
        try:
            with np.load(io.BytesIO(self._bytes(name)), allow_pickle=False) as file:
                return {key: file[key] for key in file.files}
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise ArtifactError(f"{name} is no file of plain arrays: {error}") from error

    def text(self, name: str) -> str:
        """A text file, UTF-8."""
        try:
            return self._bytes(name).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{name} is no text: {error}") from error

    def json(self, name: str) -> Any:
        """What a JSON file holds."""
        try:
            return json.loads(self.text(name))
        except json.JSONDecodeError as error:
            raise ArtifactError(f"{name} is no JSON: {error}") from error

    def _bytes(self, name: str) -> bytes:
        try:
            return self.contents[name]
        except KeyError:
            raise ArtifactError(f"the artifact lacks {name}; make it anew") from None


def save_artifact(
    folder: Path,
    *,
    kind: str,
    files: Mapping[str, bytes | str | Mapping[str, NDArray[Any]]],
    provenance: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> None:
    """Write a folder; the manifest last, so that a folder with one is whole.

    Args:
        folder: made when absent; files of the same names are replaced.
        kind: what it is for.
        files: by name without a folder: bytes, text, or arrays for an .npz file.
        provenance: see `Artifact`.
        metrics: see `Artifact`.

    Raises:
        ArtifactError: it cannot be written, or a name is none.
    """
    contents = {name: _as_bytes(name, content) for name, content in files.items()}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "provenance": dict(provenance),
        "metrics": dict(metrics),
        "files": {
            name: {"sha256": _digest(content), "bytes": len(content)}
            for name, content in contents.items()
        },
    }
    described = json.dumps(manifest, indent=2, sort_keys=True, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        for name, content in contents.items():
            _replace(folder / name, content)
        _replace(folder / MANIFEST_FILE, described.encode())
    except OSError as error:
        raise ArtifactError(f"{folder}: {error.strerror}; choose another folder") from error


def load_artifact(folder: Path, *, kind: str) -> Artifact:
    """Read a folder and check every file against the manifest.

    Raises:
        ArtifactError: it is absent, of another schema or kind, incomplete or altered.
    """
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text("utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{folder} has no {MANIFEST_FILE}; it is no artifact, or its writing was cut off"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArtifactError(f"{folder / MANIFEST_FILE} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
        found = manifest.get("schema_version") if isinstance(manifest, dict) else None
        raise ArtifactError(
            f"{folder} has schema version {found}, this program reads {SCHEMA_VERSION}; "
            "make it anew with this program"
        )
    if manifest.get("kind") != kind:
        raise ArtifactError(f"{folder} is of kind {manifest.get('kind')!r}, not {kind!r}")
    files, provenance, metrics = (manifest.get(key) for key in ("files", "provenance", "metrics"))
    if not (isinstance(files, dict) and isinstance(provenance, dict) and isinstance(metrics, dict)):
        raise ArtifactError(f"{folder / MANIFEST_FILE} is incomplete; make the artifact anew")
    return Artifact(
        kind=kind,
        provenance=provenance,
        metrics=metrics,
        contents={name: _verified(folder, name, entry) for name, entry in files.items()},
    )


def file_digest(path: Path) -> str:
    """sha256 of a file, hexadecimal: how provenance names its sources."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _verified(folder: Path, name: str, entry: Any) -> bytes:
    path = folder / _checked_name(name)
    if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
        raise ArtifactError(f"{folder / MANIFEST_FILE} has no hash of {name}")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ArtifactError(f"{path} has more than {_MOST_BYTES} bytes")
        content = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}; make the artifact anew") from error
    if _digest(content) != entry["sha256"]:
        raise ArtifactError(
            f"{path} is not the file that the manifest names (its sha256 differs); "
            "copy or make the artifact anew"
        )
    return content


def _checked_name(name: str) -> str:
    if not name or name == MANIFEST_FILE or name.startswith(".") or Path(name).name != name:
        raise ArtifactError(f"{name!r} is no name of an artifact's file")
    return name


def _as_bytes(name: str, content: bytes | str | Mapping[str, NDArray[Any]]) -> bytes:
    _checked_name(name)
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode("utf-8")
    if any(array.dtype.hasobject for array in content.values()):
        raise ArtifactError(f"{name}: arrays of objects would have to be pickled")
    buffer = io.BytesIO()
    arrays: dict[str, Any] = dict(content)
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
