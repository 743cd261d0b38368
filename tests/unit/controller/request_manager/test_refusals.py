from dataclasses import replace
from typing import Any

import pytest

from controller.config import RoutingSettings
from controller.domain.answer_length import AnswerLengthCurve
from controller.domain.cluster import ClusterSnapshot, NodeState
from controller.domain.refusal import Refusal, RefusalReason
from controller.domain.request import ChatMessage, Constraints, InferenceRequest, Sampling
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
from controller.request_manager.decider import MAX_OTHERS, Decider
from controller.request_manager.refusals import refusal_error, refusal_sentence
from tests.fakes.reports import hello, join, reported_model

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


REQUEST = InferenceRequest(RequestId("r1"), "Hello there")


def fleet(*nodes: tuple[str, str, int]) -> ClusterSnapshot:
    """Ready nodes: (node, its model, that model's context)."""
    profiler = ProfilerState(10.0)
    for name, model, context in nodes:
        join(profiler, 0.0, hello(name, (reported_model(model, context_tokens=context),)))
    return profiler.snapshot(0.0)


async def error_for(request: InferenceRequest, snapshot: ClusterSnapshot) -> RouterError:
    """What the client of a request reads that no destination takes."""
    decider = Decider(RoutingSettings(policy="least-loaded"))
    try:
        _, (placement,) = await decider.decide([request], snapshot)
    except RouterError as error:
        return error
    assert placement.chosen is None
    return refusal_error(request, placement, {d.model for d in snapshot.destinations})


def changed(snapshot: ClusterSnapshot, **changes: Any) -> ClusterSnapshot:
    """The same fleet with every destination changed."""
    destinations = tuple(replace(one, **changes) for one in snapshot.destinations)
    return replace(snapshot, destinations=destinations)


async def test_fleet_with_nobody_in_it() -> None:
    error = await error_for(REQUEST, fleet())
    assert type(error) is NoDestinationError
    assert "start an agent" in str(error)


async def test_model_that_nobody_serves_lists_those_that_are_served() -> None:
    snapshot = fleet(("pi", "small", 2048), ("vm", "large", 2048), ("vm2", "large", 2048))
    error = await error_for(replace(REQUEST, model=ModelName("huge")), snapshot)
    assert type(error) is UnknownModelError
    assert str(error) == "No node serves model 'huge'. Served now: large, small."


async def test_nodes_that_are_away_are_named_with_their_reason() -> None:
    profiler = ProfilerState(10.0)
    node_id = join(profiler, 0.0)
    profiler.apply(NodeDisconnected(node_id), 1.0)
    snapshot = profiler.snapshot(1.0)
    assert snapshot.nodes[0].state is NodeState.OFFLINE
    error = await error_for(REQUEST, snapshot)
    assert type(error) is NoDestinationError
    assert "pi/small: node is offline" in str(error)


async def test_prompt_longer_than_every_context() -> None:
    snapshot = fleet(("pi", "small", 100), ("vm", "large", 200))
    error = await error_for(replace(REQUEST, prompt="word " * 400), snapshot)
    assert type(error) is ContextExceededError
    assert "at most 200" in str(error)


async def test_prompt_that_leaves_no_room_for_its_answer() -> None:
    """Routing counts the expected answer, so the error must, too."""
    snapshot = fleet(("pi", "small", 100))
    prompt = "x" * 4 * 80
    sampling = Sampling(max_tokens=256)
    error = await error_for(replace(REQUEST, prompt=prompt, sampling=sampling), snapshot)
    assert type(error) is ContextExceededError
    assert "max_tokens" in str(error)
    short = replace(
        REQUEST,
        prompt=prompt,
        sampling=Sampling(max_tokens=5),
        constraints=Constraints(min_quality_ratio=1.0),
    )
    assert type(await error_for(short, snapshot)) is ConstraintsError


async def test_turns_of_a_chat_take_room_of_their_own() -> None:
    snapshot = fleet(("pi", "small", 100))
    turns = tuple(ChatMessage("user", "abcd") for _ in range(30))
    error = await error_for(replace(REQUEST, prompt=turns), snapshot)
    assert type(error) is ContextExceededError


async def test_only_the_contexts_of_the_model_asked_for_count() -> None:
    snapshot = fleet(("pi", "small", 100), ("vm", "large", 20_000))
    request = replace(REQUEST, prompt="word " * 400, model=ModelName("small"))
    error = await error_for(request, snapshot)
    assert type(error) is ContextExceededError
    assert "at most 100" in str(error)


@pytest.mark.parametrize("model", [None, "small"])
async def test_limits_of_the_request_refuse_what_would_otherwise_take_it(model: str | None) -> None:
    snapshot = fleet(("pi", "small", 2048), ("vm", "large", 2048))
    request = replace(
        REQUEST,
        model=ModelName(model) if model else None,
        constraints=Constraints(min_quality_ratio=1.0),
    )
    error = await error_for(request, snapshot)
    assert type(error) is ConstraintsError
    assert "pi/small: predicted quality" in str(error)
    assert ("vm/large" in str(error)) is (model is None)


async def test_what_a_template_adds_to_a_prompt_counts_as_it_does_in_routing() -> None:
    snapshot = changed(fleet(("pi", "small", 100)), extra_prompt_tokens=50.0)
    request = replace(REQUEST, prompt="x" * 4 * 60, sampling=Sampling(max_tokens=5))
    error = await error_for(request, snapshot)
    assert type(error) is ContextExceededError
    assert "About 110 prompt and 5 answer tokens" in str(error)


async def test_answers_as_long_as_the_destination_writes_them_count_as_they_do_in_routing() -> None:
    long_answers = AnswerLengthCurve((0.0, 200.0), (1.0, 0.0))
    snapshot = changed(fleet(("pi", "small", 250)), answer_lengths=long_answers)
    request = replace(REQUEST, prompt="x" * 4 * 60, sampling=Sampling(max_tokens=256))
    error = await error_for(request, snapshot)
    assert type(error) is ContextExceededError
    assert "200 answer tokens fit" in str(error)


async def test_short_answers_of_a_destination_leave_the_limits_of_the_request_as_the_cause() -> (
    None
):
    short_answers = AnswerLengthCurve((0.0, 10.0), (1.0, 0.0))
    snapshot = changed(fleet(("pi", "small", 100)), answer_lengths=short_answers)
    request = replace(
        REQUEST,
        prompt="x" * 4 * 60,
        sampling=Sampling(max_tokens=256),
        constraints=Constraints(min_quality_ratio=1.0),
    )
    error = await error_for(request, snapshot)
    assert type(error) is ConstraintsError
    assert "context" not in str(error)


async def test_one_context_that_suffices_decides_over_any_number_that_do_not() -> None:
    small = [(f"pi-{number:03}", "small", 50) for number in range(2 * MAX_OTHERS)]
    snapshot = fleet(*small, ("vm", "large", 2048))
    request = replace(REQUEST, prompt="x" * 400, constraints=Constraints(min_quality_ratio=1.0))
    error = await error_for(request, snapshot)
    assert type(error) is ConstraintsError
    assert "vm/large: predicted quality" in str(error)


@pytest.mark.parametrize("reason", RefusalReason)
async def test_every_reason_has_a_sentence(reason: RefusalReason) -> None:
    figures = (("small", "large"), (3.0, 2.0, 1.0))
    assert any(_worded(Refusal(reason, those)) for those in figures)


def _worded(refusal: Refusal) -> str:
    try:
        return refusal_sentence(refusal)
    except ValueError:  # names where it has numbers
        return ""
