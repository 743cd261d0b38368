"""What `edge-agent models` does: list, pull, verify and remove, each as one function.

The command line parses, calls one of these and prints its result, with `to_json` or with
`render`. Nothing here prints.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent.errors import ModelFileError
from edge_agent.models.catalog import Catalog, CatalogEntry
from edge_agent.models.progress import OnProgress, ignore_progress
from edge_agent.models.pull import PullSettings, Quantiser, pull
from edge_agent.models.store import ModelPresence, ModelStore


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One catalogue entry and what the models folder has of it.

    Attributes:
        size_bytes: of the whole file; None for a derived model that has not been made.
        on_disk_bytes: what is there now; less than `size_bytes` while a pull is unfinished.
        sha256: None for a derived model that has not been made.
        source: where the installed file came from; None when it is not installed.
        verified_time: when it was last hashed, ISO 8601 in UTC; None when it never was.
    """

    name: str
    family: str
    parameters_billions: float
    quantisation: str
    context_tokens: int
    chat: bool
    licence: str
    licence_url: str | None
    summary: str
    derive_from: str | None
    sources: tuple[str, ...]
    presence: ModelPresence
    path: Path
    size_bytes: int | None
    on_disk_bytes: int
    sha256: str | None
    source: str | None
    verified_time: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the model as a value for `json.dumps`; keys are only ever added."""
        return {
            "name": self.name,
            "presence": self.presence.value,
            "path": str(self.path),
            "size_bytes": self.size_bytes,
            "on_disk_bytes": self.on_disk_bytes,
            "sha256": self.sha256,
            "source": self.source,
            "verified_time": self.verified_time,
            "family": self.family,
            "parameters_billions": self.parameters_billions,
            "quantisation": self.quantisation,
            "context_tokens": self.context_tokens,
            "chat": self.chat,
            "licence": self.licence,
            "licence_url": self.licence_url,
            "summary": self.summary,
            "derive_from": self.derive_from,
            "sources": list(self.sources),
        }


@dataclass(frozen=True, slots=True)
class ModelList:
    """All models of the catalogue, in its order."""

    folder: Path
    models: tuple[ListedModel, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the list as a value for `json.dumps`."""
        return {"folder": str(self.folder), "models": [model.to_json() for model in self.models]}


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model that is in the folder now.

    Attributes:
        was_installed: it was there before, so that nothing had to be done.
        seconds: how long the pull took.
    """

    name: str
    path: Path
    size_bytes: int
    sha256: str
    source: str
    was_installed: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the result as a value for `json.dumps`."""
        return {
            "name": self.name,
            "path": str(self.path),
            "size_bytes": self.size_bytes,
            "sha256": self.sha256,
            "source": self.source,
            "was_installed": self.was_installed,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """One file that was hashed; `problem` is None when it is what the catalogue says."""

    name: str
    path: Path
    sha256: str | None
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the result as a value for `json.dumps`."""
        return {
            "name": self.name,
            "path": str(self.path),
            "sha256": self.sha256,
            "ok": self.problem is None,
            "problem": self.problem,
        }


@dataclass(frozen=True, slots=True)
class Verification:
    """What became of a check of one or all installed models."""

    models: tuple[CheckedModel, ...]

    @property
    def ok(self) -> bool:
        """Whether every file is what the catalogue says."""
        return all(model.problem is None for model in self.models)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a value for `json.dumps`."""
        return {"ok": self.ok, "models": [model.to_json() for model in self.models]}


@dataclass(frozen=True, slots=True)
class RemovedModel:
    """A model whose files are gone; `freed_bytes` is 0 when there were none."""

    name: str
    freed_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the result as a value for `json.dumps`."""
        return {"name": self.name, "freed_bytes": self.freed_bytes}


def list_models(catalog: Catalog, store: ModelStore) -> ModelList:
    """Say of every model what it is and whether it is installed; reads no model file."""
    models = tuple(_listed(entry, store) for entry in catalog.entries.values())
    return ModelList(store.folder, models)


def pull_model(
    catalog: Catalog,
    store: ModelStore,
    name: str,
    *,
    settings: PullSettings | None = None,
    on_progress: OnProgress = ignore_progress,
    quantiser: Quantiser | None = None,
) -> PulledModel:
    """Get a model into the folder; run outside an event loop. Inside one, await `pull.pull`.

    Raises:
        UnknownModelError: the catalogue has no such model.
        ModelError: it cannot be had; see `pull.pull`.
    """
    entry = catalog.get(name)
    was_installed = store.state_of(entry).presence is ModelPresence.INSTALLED
    begun = time.monotonic()
    path = asyncio.run(
        pull(entry, store, catalog, settings=settings, on_progress=on_progress, quantiser=quantiser)
    )
    seconds = time.monotonic() - begun
    sidecar = store.state_of(entry).sidecar
    if sidecar is None:
        raise ModelFileError(f"{path} was removed while it was being pulled. Pull {name} again.")
    return PulledModel(
        name, path, sidecar.size_bytes, sidecar.sha256, sidecar.source, was_installed, seconds
    )


def verify_models(
    catalog: Catalog, store: ModelStore, names: Sequence[str] | None = None
) -> Verification:
    """Hash these models' files and compare them with the catalogue.

    Args:
        catalog: what they should be.
        store: where they are.
        names: which; None checks all that are there.

    Raises:
        UnknownModelError: the catalogue has no such model; nothing was checked.
    """
    if names is None:
        entries = [
            entry
            for entry in catalog.entries.values()
            if store.state_of(entry).presence not in (ModelPresence.ABSENT, ModelPresence.PARTIAL)
        ]
    else:
        entries = [catalog.get(name) for name in names]
    return Verification(tuple(_checked(entry, store) for entry in entries))


def remove_model(catalog: Catalog, store: ModelStore, name: str) -> RemovedModel:
    """Remove a model's file and its unfinished downloads.

    Raises:
        UnknownModelError: the catalogue has no such model.
        ModelError: it is being pulled now, or the folder cannot be written.
    """
    return RemovedModel(name, store.remove(catalog.get(name)))


def _checked(entry: CatalogEntry, store: ModelStore) -> CheckedModel:
    path = store.path_of(entry)
    try:
        return CheckedModel(entry.name, path, store.verify(entry).sha256, None)
    except ModelFileError as error:
        return CheckedModel(entry.name, path, None, str(error))


def _listed(entry: CatalogEntry, store: ModelStore) -> ListedModel:
    state = store.state_of(entry)
    sidecar = state.sidecar
    return ListedModel(
        name=entry.name,
        family=entry.family,
        parameters_billions=entry.parameters_billions,
        quantisation=entry.quantisation,
        context_tokens=entry.context_tokens,
        chat=entry.template.accepts_chats,
        licence=entry.licence.name,
        licence_url=entry.licence.url,
        summary=entry.summary,
        derive_from=entry.derive_from,
        sources=tuple(source.describe() for source in entry.sources),
        presence=state.presence,
        path=store.path_of(entry),
        size_bytes=entry.size_bytes or (sidecar.size_bytes if sidecar else None),
        on_disk_bytes=state.size_bytes,
        sha256=entry.sha256 or (sidecar.sha256 if sidecar else None),
        source=sidecar.source if sidecar else None,
        verified_time=sidecar.verified_time if sidecar else None,
    )
