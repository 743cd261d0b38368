"""A live controller decides by the predictors that were fitted, and says where it could not."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from controller import app
from controller.config import (
    PredictorSettings,
    QualitySettings,
    ServerSettings,
    Settings,
    SettingsError,
)
from controller.domain.hardware import DeviceClass, ModelConfiguration
from controller.predictors.fitted import save_predictors
from controller.quality.embedding import OnnxEmbedding
from edge_agent.config import ModelSettings
from pointsman.v1 import router_pb2
from tests.fakes.fleet import infer_request, running_fleet

pytest.importorskip("lightgbm")
pytest.importorskip("sklearn")
pytestmark = pytest.mark.anyio

SUMS = "What is {a} plus {b}? Give the number."
POEMS = "Write a short poem about {a} birds and {b} trees."
SECONDS = 3.0
"""Of every answer, as measured; the fake engine's calibration foretells a fraction of it."""


@pytest.fixture
def fitted(tmp_path: Path, embedding: QualitySettings) -> PredictorSettings:
    """Measured at node a alone: fake-a is right with sums, fake-b with poems."""
    from controller.lab.training.fit_predictors import fit
    from controller.lab.training.measurement_table import TrainingTable
    from controller.predictors.fitted import MeasuredLimits

    texts = [form.format(a=3 * at + 1, b=7 * at + 2) for form in (SUMS, POEMS) for at in range(30)]
    label = np.repeat([1, 0], 30)
    query, model = (part.ravel() for part in np.meshgrid(np.arange(60), [0, 1], indexing="ij"))
    model_class = ModelConfiguration("fake", 0.1, 4)
    noise = np.random.default_rng(0).normal(0.0, 0.02, query.shape)
    table = TrainingTable(
        prompts=tuple(texts),
        classes=("poems", "sums"),
        class_index=label,
        model_names=("fake-a", "fake-b"),
        models=(model_class, model_class),
        devices=(DeviceClass("a", 4, 8 << 30),),
        query=query,
        model=model,
        device=np.zeros_like(query),
        seconds=SECONDS * np.exp(noise),
        completion_tokens=np.full(query.shape, 20.0),
        score_ratio=(label[query] == 1 - model).astype(np.float64),
        limits=MeasuredLimits(64, 1.0),
    )
    embed = OnnxEmbedding(Path(embedding.embedding_dir)).embed
    predictors, _ = fit(table, embed, boosted_trees=20, forest_trees=30, threads=1)
    save_predictors(tmp_path / "predictors", predictors, provenance={})
    return PredictorSettings(str(tmp_path / "predictors"))


async def test_classes_choose_the_model_and_strangers_are_told_apart(
    tmp_path: Path, embedding: QualitySettings, fitted: PredictorSettings
) -> None:
    async with running_fleet(tmp_path, quality=embedding, predictors=fitted) as fleet:
        await fleet.add_agent("a", (ModelSettings("fake-a"), ModelSettings("fake-b")))
        await fleet.add_agent("stranger", (ModelSettings("fake-a"), ModelSettings("fake-c")))
        prompts = [SUMS.format(a=5, b=6), POEMS.format(a=5, b=6)]
        requests = [infer_request(prompt, max_tokens=64).request for prompt in prompts]
        response = await fleet.client.router.Route(
            router_pb2.RouteRequest(requests=requests, policy="high-accuracy"), timeout=20
        )
        assert response.decision.predictors.startswith("predictors ")
        assert [place.chosen.model for place in response.placements] == ["fake-a", "fake-b"]
        seen = {
            (each.node_id, each.model): each
            for each in (response.placements[0].chosen, *response.placements[0].others)
        }
        known = seen["a", "fake-b"]
        assert (known.quality_source, known.latency_source) == ("class table", "fitted")
        assert known.latency_seconds == pytest.approx(SECONDS, rel=0.1)
        elsewhere = seen["stranger", "fake-a"]
        assert elsewhere.quality_source == "class table"  # the machine does not change answers
        assert elsewhere.latency_source.startswith("calibration: hardware ")
        assert elsewhere.latency_seconds < SECONDS / 2
        unknown = seen["stranger", "fake-c"]
        assert unknown.quality_source == "prior"
        assert unknown.latency_source.startswith("calibration: ")

        _, account = await fleet.infer(prompts[0], max_tokens=8)
        assert account.query_class == "sums"
        explained = await fleet.client.router.Explain(
            router_pb2.ExplainRequest(request_id=account.request_id), timeout=5
        )
        assert explained.account.query_class == "sums"
        assert explained.decision.predictors == response.decision.predictors


async def test_longer_answers_than_were_measured_are_left_to_the_calibration(
    tmp_path: Path, embedding: QualitySettings, fitted: PredictorSettings
) -> None:
    async with running_fleet(tmp_path, quality=embedding, predictors=fitted) as fleet:
        await fleet.add_agent("a", (ModelSettings("fake-a"),))
        request = infer_request(SUMS.format(a=5, b=6), max_tokens=65).request
        response = await fleet.client.router.Route(
            router_pb2.RouteRequest(requests=[request]), timeout=20
        )
        chosen = response.placements[0].chosen
        assert chosen.quality_source == "class table"
        assert chosen.latency_source.startswith("calibration: 65 tokens are allowed")


async def test_without_an_embedding_model_nothing_is_classified(
    tmp_path: Path, fitted: PredictorSettings
) -> None:
    nowhere = QualitySettings(embedding_dir=str(tmp_path / "nothing"))
    async with running_fleet(tmp_path, quality=nowhere, predictors=fitted) as fleet:
        await fleet.add_agent("a", (ModelSettings("fake-a"),))
        _, account = await fleet.infer()
        assert account.query_class == ""
        explained = await fleet.client.router.Explain(
            router_pb2.ExplainRequest(request_id=account.request_id), timeout=5
        )
        assert explained.decision.predictors == ""
        assert explained.placement.chosen.latency_source == ""


async def test_a_folder_without_predictors_is_an_error_of_the_settings(
    tmp_path: Path, embedding: QualitySettings
) -> None:
    settings = Settings(
        server=ServerSettings("127.0.0.1:0", "", tmp_path / "controller"),
        quality=embedding,
        predictors=PredictorSettings(str(tmp_path / "nothing")),
    )
    with pytest.raises(SettingsError, match=r"predictors\.folder"):
        await app.serve(settings, asyncio.Event(), lambda listening: None)
