from dataclasses import replace

import pytest

from controller.domain.batch import Candidate, Placement
from controller.domain.cluster import ClusterSnapshot, NodeState
from controller.domain.request import ChatMessage, InferenceRequest, Sampling
from controller.errors import (
    ConstraintsError,
    ContextExceededError,
    NoDestinationError,
    RouterError,
    UnknownModelError,
)
from controller.ids import ModelName, RequestId
from controller.profiler.events import NodeDisconnected
from controller.profiler.state import ProfilerState
from controller.request_manager.refusals import refusal_error
from tests.fakes.reports import hello, join, reported_model

REQUEST = InferenceRequest(RequestId("r1"), "Hello there")


def fleet(*nodes: tuple[str, str, int]) -> ClusterSnapshot:
    """Ready nodes: (node, its model, that model's context)."""
    profiler = ProfilerState(10.0)
    for name, model, context in nodes:
        join(profiler, 0.0, hello(name, (reported_model(model, context_tokens=context),)))
    return profiler.snapshot(0.0)


def refused(snapshot: ClusterSnapshot, why: str = "too dear") -> Placement:
    return Placement(
        REQUEST.request_id,
        None,
        tuple(
            Candidate(d.node_id, d.model, 0.5, "prior", 0, 0, 0, 0, 0, 1.0, refusal=why)
            for d in snapshot.destinations
        ),
    )


def error_for(request: InferenceRequest, snapshot: ClusterSnapshot) -> RouterError:
    return refusal_error(request, refused(snapshot), snapshot)


def test_fleet_with_nobody_in_it() -> None:
    error = error_for(REQUEST, fleet())
    assert type(error) is NoDestinationError
    assert "start an agent" in str(error)


def test_model_that_nobody_serves_lists_those_that_are_served() -> None:
    snapshot = fleet(("pi", "small", 2048), ("vm", "large", 2048), ("vm2", "large", 2048))
    error = error_for(replace(REQUEST, model=ModelName("huge")), snapshot)
    assert type(error) is UnknownModelError
    assert str(error) == "No node serves model 'huge'. Served now: large, small."


def test_nodes_that_are_away_are_named_with_their_reason() -> None:
    profiler = ProfilerState(10.0)
    node_id = join(profiler, 0.0)
    profiler.apply(NodeDisconnected(node_id), 1.0)
    snapshot = profiler.snapshot(1.0)
    assert snapshot.nodes[0].state is NodeState.OFFLINE
    error = refusal_error(REQUEST, refused(snapshot, "node is offline"), snapshot)
    assert type(error) is NoDestinationError
    assert "pi/small: node is offline" in str(error)


def test_prompt_longer_than_every_context() -> None:
    """Case P8."""
    snapshot = fleet(("pi", "small", 100), ("vm", "large", 200))
    error = error_for(replace(REQUEST, prompt="word " * 400), snapshot)
    assert type(error) is ContextExceededError
    assert "at most 200" in str(error)


def test_prompt_that_leaves_no_room_for_its_answer() -> None:
    """Case P8: routing counts the expected answer, so the error must, too."""
    snapshot = fleet(("pi", "small", 100))
    prompt = "x" * 4 * 80
    sampling = Sampling(max_tokens=256)
    error = error_for(replace(REQUEST, prompt=prompt, sampling=sampling), snapshot)
    assert type(error) is ContextExceededError
    assert "max_tokens" in str(error)
    short = replace(REQUEST, prompt=prompt, sampling=Sampling(max_tokens=5))
    assert type(error_for(short, snapshot)) is ConstraintsError


def test_turns_of_a_chat_take_room_of_their_own() -> None:
    snapshot = fleet(("pi", "small", 100))
    turns = tuple(ChatMessage("user", "abcd") for _ in range(30))
    assert type(error_for(replace(REQUEST, prompt=turns), snapshot)) is ContextExceededError


def test_only_the_contexts_of_the_model_asked_for_count() -> None:
    snapshot = fleet(("pi", "small", 100), ("vm", "large", 20_000))
    request = replace(REQUEST, prompt="word " * 400, model=ModelName("small"))
    error = error_for(request, snapshot)
    assert type(error) is ContextExceededError
    assert "at most 100" in str(error)


@pytest.mark.parametrize("model", [None, "small"])
def test_limits_of_the_request_refuse_what_would_otherwise_take_it(model: str | None) -> None:
    snapshot = fleet(("pi", "small", 2048), ("vm", "large", 2048))
    request = replace(REQUEST, model=ModelName(model) if model else None)
    error = error_for(request, snapshot)
    assert type(error) is ConstraintsError
    assert "pi/small: too dear" in str(error)
    assert ("vm/large" in str(error)) is (model is None)
