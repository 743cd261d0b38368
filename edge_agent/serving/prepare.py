"""From a model's name to a verified file, by way of the catalogue."""

from edge_agent.config import Settings
from edge_agent.engine.spec import PreparedModel, Report
from edge_agent.models.progress import PullProgress, PullStage


class ModelPreparer:
    """Pulls what is missing, and verifies what is there; see `FetchModel`."""

    def __init__(self, settings: Settings) -> None:
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Go by other settings from now on."""
        self._settings = settings

    async def __call__(self, name: str, report: Report) -> PreparedModel:
        """Prepare a model of the catalogue; see `FetchModel`."""
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
