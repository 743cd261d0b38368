"""From a model's name to a verified file, by way of the catalogue."""

import hashlib

from edge_agent.config import RemoteSettings, Settings
from edge_agent.models.progress import PullProgress, PullStage
from edge_agent.serving.hosted import PreparedModel, Report


class ModelPreparer:
    """Pulls what is missing, and verifies what is there; a remote model needs neither."""

    def __init__(self, settings: Settings) -> None:
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Go by other settings from now on."""
        self._settings = settings
        self._remote = {model.name: model.remote for model in settings.models if model.remote}

    async def __call__(self, name: str, report: Report) -> PreparedModel:
        """Prepare a model; see `PrepareModel`."""
        if name in self._remote:
            return describe_remote(name, self._remote[name])
        # Read late: the catalogue and the downloader cost start-up time, and an agent whose models
        # are all there needs them once.
        from edge_agent.models.catalog import load_catalog
        from edge_agent.models.pull import pull
        from edge_agent.models.store import ModelStore

        catalog = load_catalog(user_path=self._settings.catalog_path)
        entry = catalog.get(name)
        store = ModelStore(self._settings.models_path)
        last: tuple[str, float | None] = ("", None)

        def on_progress(progress: PullProgress) -> None:
            nonlocal last
            text, ratio = f"{progress.stage.value}: {progress.text}", None
            if progress.total_bytes and progress.stage is not PullStage.DONE:
                # In steps of 1 %, so that the controller is not told of every block.
                ratio = min(100, 100 * progress.done_bytes // progress.total_bytes) / 100.0
            if (text, ratio) != last:
                last = (text, ratio)
                report(text, ratio, progress.stage is PullStage.DOWNLOADING)

        path = await pull(entry, store, catalog, on_progress=on_progress)
        sidecar = store.state_of(entry).sidecar
        return PreparedModel(
            path=path,
            digest=sidecar.sha256 if sidecar else entry.sha256 or "",
            family=entry.family,
            parameters_billions=entry.parameters_billions,
            quantisation=entry.quantisation,
            context_tokens=entry.context_tokens,
            chat_template=entry.template.jinja,
            is_base_model=entry.is_base_model,
        )


def describe_remote(name: str, remote: RemoteSettings) -> PreparedModel:
    """What routing is told of a remote model before its endpoint was asked."""
    where = f"{remote.base_url.rstrip('/')} {remote.model}"
    return PreparedModel(
        path=None,
        # Whose bytes these are, nobody can say; where they are is all that tells two apart.
        digest=f"remote-{hashlib.sha256(where.encode()).hexdigest()}",
        family=remote.family or name,
        parameters_billions=remote.parameters_billions,
        quantisation=remote.quantisation,
        context_tokens=remote.context_tokens,
        chat_template=None,
        is_base_model=remote.is_base_model,
    )
