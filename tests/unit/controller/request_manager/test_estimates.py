"""Who estimates what: the fitted predictors where they know, similar prompts elsewhere."""

from dataclasses import replace

import numpy as np

from controller.domain.request import InferenceRequest, Sampling
from controller.ids import RequestId
from controller.predictors.class_conditioned import ClassPredictions
from controller.quality.neighbours import Source
from controller.quality.predictor import Predictions
from controller.request_manager.estimates import combined, estimate
from controller.routing.decision_memory import DecisionMemory
from tests.unit.controller.routing.clusters import destination, fleet, node, request

SNAPSHOT = fleet(
    [node("a"), node("b")],
    [replace(destination("a"), mean_quality_ratio=0.4), destination("b")],
)
TOLD = ClassPredictions(
    classes=("sums",),
    quality=np.array([[0.9, np.nan]]),
    output_tokens=np.array([[30.0, np.nan]]),
    inference_seconds=np.array([[2.0, np.nan]]),
    gaps_of_requests=("",),
    gaps_of_destinations=("", "hardware 'odd' was not measured"),
)
SIMILAR = Predictions(
    quality=np.array([[0.1, 0.2]]),
    output_tokens=np.array([[11.0, 12.0]]),
    median_tokens=np.array([[9.0, 10.0]]),
    quality_source=np.array([[int(Source.NEIGHBOURS)] * 2]),
    quality_count=np.array([[57, 9]]),
)


def asked(limit: int = 64) -> list[InferenceRequest]:
    return [InferenceRequest(RequestId("r"), "1 + 1?", sampling=Sampling(max_tokens=limit))]


def test_what_was_fitted_goes_before_similar_prompts() -> None:
    found = combined(asked(), SNAPSHOT, SIMILAR, TOLD, DecisionMemory(), "predictors 12ab")
    assert found.quality is not None
    assert found.quality.tolist() == [[0.9, 0.2]]
    assert found.output_tokens is not None
    assert found.output_tokens.tolist() == [[30.0, 12.0]]
    assert found.median_tokens is not None
    assert found.median_tokens.tolist() == [[30.0, 10.0]]
    assert found.class_quality is not None
    assert found.class_quality.tolist() == [[0.9, 0.2]]
    assert found.inference_seconds is TOLD.inference_seconds
    assert [found.quality_source(0, d, "prior") for d in (0, 1)] == ["class table", "neighbours"]
    assert [found.quality_count(0, d, 3) for d in (0, 1)] == [0, 9]
    assert [found.latency_source(0, d) for d in (0, 1)] == [
        "fitted",
        "calibration: hardware 'odd' was not measured",
    ]
    assert found.query_class(0) == "sums"
    assert found.predictors == "predictors 12ab"


def test_where_nobody_else_knows_the_destination_says_it() -> None:
    found = combined(asked(), SNAPSHOT, None, TOLD, DecisionMemory())
    assert found.quality is not None
    assert found.quality[0, 1] == SNAPSHOT.destinations[1].mean_quality_ratio
    assert found.output_tokens is not None
    assert 1.0 < found.output_tokens[0, 1] < 64.0
    assert found.quality_source(0, 1, "prior") == "prior"
    assert found.quality_count(0, 1, 3) == 3


def test_a_limit_that_was_not_measured_is_the_reason_at_every_destination() -> None:
    nothing = np.full((1, 2), np.nan)
    beyond = replace(TOLD, inference_seconds=nothing, gaps_of_requests=("too long",))
    found = combined(asked(), SNAPSHOT, None, beyond, DecisionMemory())
    assert [found.latency_source(0, d) for d in (0, 1)] == ["calibration: too long"] * 2


def test_without_fitted_predictors_similar_prompts_decide_alone() -> None:
    found = combined(asked(), SNAPSHOT, SIMILAR, None, DecisionMemory())
    assert found.quality is SIMILAR.quality
    assert found.inference_seconds is None
    assert found.class_quality is None
    assert (found.query_class(0), found.latency_source(0, 0), found.predictors) == ("", "", "")
    assert found.quality_source(0, 0, "prior") == "neighbours"
    assert found.quality_count(0, 0, 3) == 57


class Failing:
    """A predictor that breaks."""

    name = "broken"

    def predict(self, *arguments: object) -> None:
        raise RuntimeError("no")


def test_predictors_that_fail_are_left_out() -> None:
    found = estimate([request()], SNAPSHOT, Failing(), Failing(), DecisionMemory())  # type: ignore[arg-type]
    assert (found.quality, found.similar, found.told, found.predictors) == (None, None, None, "")
