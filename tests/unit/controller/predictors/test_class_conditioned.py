"""The fitted predictors over a fleet: known pairs are predicted, unknown ones say why not."""

from dataclasses import replace

import numpy as np
import pytest

from controller.domain.cluster import (
    Calibration,
    ClusterSnapshot,
    Destination,
    NetworkPath,
    Node,
    NodeKind,
    NodeState,
    TokenPrice,
)
from controller.domain.hardware import DeviceClass, ModelConfiguration
from controller.ids import ModelName, NodeId
from controller.predictors.class_conditioned import ClassConditioned
from controller.predictors.features import profile_query
from controller.predictors.fitted import FittedPredictors, MeasuredLimits
from controller.routing.decision_memory import DecisionMemory
from tests.fakes.predictors import fitted_predictors

PI = DeviceClass("Pi 5", 4, 8 << 30)


def node(name: str, device: DeviceClass | None = PI) -> Node:
    return Node(
        NodeId(name), NodeKind.EDGE, NodeState.READY, None, NetworkPath(0.0, 1e9, 1e9), 0.0, 0,
        device=device,
    )  # fmt: skip


def destination(node_id: str, model: str, billions: float = 1.0, **changes) -> Destination:
    made = Destination(
        NodeId(node_id), ModelName(model), "small", billions, "Q4_0", 2048, 1, True,
        Calibration(100.0, 10.0, 10.0), TokenPrice(), 0.5, "prior", 0, 4.0,
    )  # fmt: skip
    return replace(made, **changes)


def snapshot(*pairs: tuple[Node, Destination]) -> ClusterSnapshot:
    nodes = {one.node_id: one for one, _ in pairs}
    return ClusterSnapshot(tuple(nodes.values()), tuple(where for _, where in pairs))


def embeddings(*first: float) -> np.ndarray:
    found = np.zeros((len(first), 384), dtype=np.float32)
    found[:, 0] = first
    return found


def predict(fleet: ClusterSnapshot, limit: float = 256.0, of: FittedPredictors | None = None):
    return ClassConditioned(of or fitted_predictors()).predict(
        ["a poem", "a sum"], embeddings(-1.0, 1.0), np.full(2, limit), fleet, DecisionMemory()
    )


def test_a_known_fleet_is_predicted_by_class_model_and_device() -> None:
    pi = node("a")
    fleet = snapshot((pi, destination("a", "small-1b")), (pi, destination("a", "small-3b", 3.0)))
    found = predict(fleet)
    assert found.classes == ("poems", "sums")
    np.testing.assert_allclose(found.quality, [[0.9, 0.3], [0.2, 0.9]], rtol=1e-6)
    np.testing.assert_allclose(found.output_tokens, [[100.0, 80.0], [10.0, 20.0]], rtol=1e-6)
    np.testing.assert_allclose(found.inference_seconds, [[2.0, 6.0], [2.0, 6.0]])
    assert found.gaps_of_destinations == ("", "")
    assert found.gaps_of_requests == ("", "")


@pytest.mark.parametrize(
    ("where", "what", "gap"),
    [
        (node("a", replace(PI, kind="Pi 3")), destination("a", "small-1b"), "hardware 'Pi 3'"),
        (node("a", None), destination("a", "small-1b"), "does not say"),
        (node("a"), destination("a", "small-1b", quantisation="MXFP"), "quantisation"),
        (node("a"), destination("a", "small-1b", family="large"), "family 'large'"),
    ],
)
def test_seconds_of_what_was_not_measured_are_not_told(
    where: Node, what: Destination, gap: str
) -> None:
    found = predict(snapshot((where, what), (node("b"), destination("b", "small-1b"))))
    assert np.isnan(found.inference_seconds[:, 0]).all()
    assert np.isfinite(found.inference_seconds[:, 1]).all()
    assert gap in found.gaps_of_destinations[0]
    assert found.gaps_of_destinations[1] == ""
    assert np.isfinite(found.quality).all()  # the model's answers do not depend on the machine


def test_quality_of_a_model_that_was_not_asked_is_not_told() -> None:
    found = predict(snapshot((node("a"), destination("a", "small-2b", 2.0))))
    assert np.isnan(found.quality).all()
    assert np.isnan(found.output_tokens).all()
    assert np.isfinite(found.inference_seconds).all()  # by its numbers
    assert "small-2b" in found.gaps_of_destinations[0]


def test_a_node_that_was_measured_by_itself_is_known_by_its_name() -> None:
    own = node("node-of-its-own", replace(PI, kind="a board of one"))
    found = predict(snapshot((own, destination("node-of-its-own", "small-1b"))))
    assert np.isfinite(found.inference_seconds).all()


def test_answers_are_at_most_as_long_as_allowed() -> None:
    found = predict(snapshot((node("a"), destination("a", "small-1b"))), limit=30.0)
    np.testing.assert_allclose(found.output_tokens[:, 0], [30.0, 10.0], rtol=1e-6)


def test_cut_measurements_tell_nothing_of_longer_answers() -> None:
    fleet = snapshot((node("a"), destination("a", "small-1b")))
    cut = fitted_predictors(MeasuredLimits(64, 0.4))
    found = predict(fleet, limit=65.0, of=cut)
    assert np.isnan(found.inference_seconds).all()
    assert np.isnan(found.output_tokens).all()
    assert np.isfinite(found.quality).all()
    assert "65 tokens are allowed" in found.gaps_of_requests[0]
    assert np.isfinite(predict(fleet, limit=64.0, of=cut).inference_seconds).all()
    rarely = fitted_predictors(MeasuredLimits(64, 0.05))
    assert np.isfinite(predict(fleet, limit=65.0, of=rarely).inference_seconds).all()


def test_a_fleet_that_changes_is_matched_anew() -> None:
    predictors, memory = ClassConditioned(fitted_predictors()), DecisionMemory()
    texts, limits = ["a poem"], np.full(1, 256.0)
    one = snapshot((node("a"), destination("a", "small-1b")))
    two = snapshot((node("a"), destination("a", "small-3b", 3.0)))
    for fleet, seconds in ((one, 2.0), (two, 6.0), (one, 2.0)):
        found = predictors.predict(texts, embeddings(-1.0), limits, fleet, memory)
        np.testing.assert_allclose(found.inference_seconds, [[seconds]])


def test_many_destinations_are_predicted_like_their_pairs_alone() -> None:
    """Three nodes of one board share their pairs; each column is its own model's."""
    pairs = [
        (node(name), destination(name, model, billions))
        for name in ("a", "b", "c")
        for model, billions in (("small-1b", 1.0), ("small-3b", 3.0))
    ]
    of = fitted_predictors()
    found = predict(snapshot(*pairs), of=of)
    configurations = [(ModelConfiguration("small", billions, 4), PI) for billions in (1.0, 3.0)]
    queries = of.classifier.classify(
        [
            profile_query(text, embedding=row)
            for text, row in zip(["a poem", "a sum"], embeddings(-1.0, 1.0), strict=True)
        ]
    )
    alone = of.latency.predict(queries, configurations)
    assert found.inference_seconds.tolist() == np.tile(alone, 3).tolist()
