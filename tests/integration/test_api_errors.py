"""Whatever is wrong with a request, its client is told what, and the rest goes on."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from controller.api.service import RouterService
from controller.config import BatchingSettings
from edge_agent.config import ModelSettings
from edge_agent.engine.base import EngineSettings
from edge_agent.engine.fake import FakeEngine, FakeSpeeds
from pointsman.v1 import admin_pb2, router_pb2, types_pb2
from tests.fakes.fleet import RunningFleet, infer_request, running_fleet

pytestmark = pytest.mark.anyio

CODE = grpc.StatusCode
HELLO = types_pb2.InferenceRequest(prompt="Hello")
CONTEXT_TOKENS = 300


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    batching = BatchingSettings(window_seconds=0.05, quiet_seconds=0.01)
    async with running_fleet(folder, batching) as running:
        models = (
            ModelSettings("fake-a", slots=2, threads=1, context_tokens=CONTEXT_TOKENS),
            ModelSettings("fake-b", slots=2, threads=1, context_tokens=CONTEXT_TOKENS),
        )
        await running.add_agent("pi", models)
        await running.add_agent("vm", models[:1], kind="cloud")
        yield running


@pytest.fixture(autouse=True)
async def the_rest_goes_on(fleet: RunningFleet) -> AsyncIterator[None]:
    yield
    text, account = await fleet.infer("A good question?", seed=1)
    assert text
    assert account.finish_reason == types_pb2.FINISH_REASON_STOP
    for node in (await fleet.nodes()).values():
        assert (node.state, node.inflight_requests, node.backlog_seconds) == ("ready", 0, 0.0)


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    """The error that a unary or streaming call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await ending_of(call)
    return failure.value


async def ending_of(call: Any) -> str:
    """The kind of the last event of a streaming call; nothing of a unary one."""
    if not hasattr(call, "__aiter__"):
        await call
        return ""
    kinds = [event.WhichOneof("event") async for event in call]
    return str(kinds[-1])


async def infer_failure(fleet: RunningFleet, request: types_pb2.InferenceRequest) -> Any:
    return await failure_of(
        fleet.client.router.Infer(router_pb2.InferRequest(request=request), timeout=60)
    )


def error_code(failure: grpc.aio.AioRpcError) -> str:
    """The name of the error, beside its status."""
    return dict(failure.trailing_metadata() or ()).get("pointsman-error-code", "")  # type: ignore[arg-type, return-value]


def changed(**fields: Any) -> types_pb2.InferenceRequest:
    request = types_pb2.InferenceRequest(prompt="Hello")
    request.MergeFrom(types_pb2.InferenceRequest(**fields))
    return request


def sampled(**fields: Any) -> types_pb2.InferenceRequest:
    return changed(sampling=types_pb2.SamplingParameters(**fields))


def limited(**fields: Any) -> types_pb2.InferenceRequest:
    return changed(constraints=types_pb2.RequestConstraints(**fields))


def chat(*turns: tuple[str, str]) -> types_pb2.InferenceRequest:
    messages = [types_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return types_pb2.InferenceRequest(chat=types_pb2.Chat(messages=messages))


BAD_REQUESTS = {
    "no input": (types_pb2.InferenceRequest(), CODE.INVALID_ARGUMENT, "neither chat nor prompt"),
    "empty prompt": (changed(prompt=""), CODE.INVALID_ARGUMENT, "prompt is empty"),
    "blank prompt": (changed(prompt=" \n "), CODE.INVALID_ARGUMENT, "prompt is empty"),
    "empty chat": (chat(), CODE.INVALID_ARGUMENT, "prompt is empty"),
    "chat of nothing": (chat(("user", "")), CODE.INVALID_ARGUMENT, "prompt is empty"),
    "unknown role": (chat(("tool", "Hi")), CODE.INVALID_ARGUMENT, "'tool' is none of system"),
    "long id": (changed(request_id="x" * 129), CODE.INVALID_ARGUMENT, "request_id"),
    "no tokens": (sampled(max_tokens=0), CODE.INVALID_ARGUMENT, "max_tokens"),
    "negative tokens": (sampled(max_tokens=-5), CODE.INVALID_ARGUMENT, "max_tokens"),
    "cold": (sampled(temperature=-1.0), CODE.INVALID_ARGUMENT, "temperature"),
    "no temperature": (sampled(temperature=math.nan), CODE.INVALID_ARGUMENT, "temperature"),
    "no nucleus": (sampled(top_p=0.0), CODE.INVALID_ARGUMENT, "top_p"),
    "negative k": (sampled(top_k=-1), CODE.INVALID_ARGUMENT, "top_k"),
    "empty stop": (sampled(stop=[""]), CODE.INVALID_ARGUMENT, "stop"),
    "quality above 1": (limited(min_quality_ratio=2.0), CODE.INVALID_ARGUMENT, "quality"),
    "no time": (limited(deadline_seconds=0.0), CODE.INVALID_ARGUMENT, "deadline_seconds"),
    "negative price": (limited(max_price_usd=-1.0), CODE.INVALID_ARGUMENT, "max_price_usd"),
    "huge prompt": (changed(prompt="x" * 1_000_001), CODE.INVALID_ARGUMENT, "at most 1000000"),
    "unknown model": (
        changed(model="fake-c"),
        CODE.NOT_FOUND,
        "No node serves model 'fake-c'. Served now: fake-a, fake-b.",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_bad_request_is_refused_before_it_costs_anything(
    fleet: RunningFleet, name: str
) -> None:
    """An unknown model is never silently another."""
    request, status, words = BAD_REQUESTS[name]
    for failure in (
        await infer_failure(fleet, request),
        await failure_of(
            fleet.client.router.Route(
                router_pb2.RouteRequest(requests=[HELLO, request]), timeout=10
            )
        ),
    ):
        assert failure.code() is status
        assert words in (failure.details() or "")
        assert error_code(failure)


async def test_prompt_longer_than_every_context_says_so(fleet: RunningFleet) -> None:
    failure = await infer_failure(fleet, changed(prompt="word " * 2000))
    assert failure.code() is CODE.INVALID_ARGUMENT
    assert f"at most {CONTEXT_TOKENS}" in (failure.details() or "")
    assert error_code(failure) == "context_length_exceeded"


async def test_limits_that_nobody_can_keep_name_who_refused(fleet: RunningFleet) -> None:
    failure = await infer_failure(fleet, limited(min_quality_ratio=0.999))
    assert failure.code() is CODE.FAILED_PRECONDITION
    for place in ("pi/fake-a", "pi/fake-b", "vm/fake-a"):
        assert f"{place}: predicted quality" in (failure.details() or "")
    assert error_code(failure) == "constraints_not_met"


async def test_request_of_an_id_that_is_being_answered_is_refused(fleet: RunningFleet) -> None:
    request = types_pb2.InferenceRequest(request_id="same", prompt="Hello")
    first = fleet.client.router.Infer(router_pb2.InferRequest(request=request), timeout=60)
    events = aiter(first)
    assert (await anext(events)).WhichOneof("event") == "admitted"
    failure = await infer_failure(fleet, request)
    assert failure.code() is CODE.ALREADY_EXISTS
    assert "'same'" in (failure.details() or "")
    assert [event.WhichOneof("event") async for event in events][-1] == "account"
    again = fleet.client.router.Infer(router_pb2.InferRequest(request=request), timeout=60)
    assert await ending_of(again) == "account"


# -- bytes -----------------------------------------------------------------------------------------

NOT_UTF8 = b"caf\xe9"


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protobuf message."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


BAD_PROMPT = field(4, NOT_UTF8)
BAD_MESSAGES = {
    "prompt": ("RouterService/Infer", True, field(1, BAD_PROMPT)),
    "chat": ("RouterService/Infer", True, field(1, field(3, field(1, field(2, NOT_UTF8))))),
    "model": ("RouterService/Infer", True, field(1, field(2, NOT_UTF8))),
    "truncated": ("RouterService/Infer", True, field(1, BAD_PROMPT)[:-2]),
    "batch": ("RouterService/Route", False, field(1, BAD_PROMPT)),
    "policy": ("RouterService/Route", False, field(2, NOT_UTF8)),
    "explain": ("RouterService/Explain", False, field(1, NOT_UTF8)),
    "drain": ("AdminService/DrainNode", False, field(1, NOT_UTF8)),
    "set policy": ("AdminService/SetPolicy", False, field(1, NOT_UTF8)),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_message_that_cannot_be_read_is_the_clients_fault(
    fleet: RunningFleet, name: str
) -> None:
    method, streams, data = BAD_MESSAGES[name]
    async with grpc.aio.insecure_channel(fleet.listening.grpc_address) as channel:
        make = channel.unary_stream if streams else channel.unary_unary
        failure = await failure_of(make(f"/pointsman.v1.{method}")(data, timeout=60))
    assert failure.code() is CODE.INVALID_ARGUMENT
    assert "UTF-8" in (failure.details() or "")


async def test_field_of_a_newer_client_is_ignored(fleet: RunningFleet) -> None:
    newer = router_pb2.InferRequest(request=HELLO).SerializeToString() + field(15, b"new")
    async with grpc.aio.insecure_channel(fleet.listening.grpc_address) as channel:
        stream = channel.unary_stream("/pointsman.v1.RouterService/Infer")(newer, timeout=60)
        events = [router_pb2.InferResponse.FromString(data) async for data in stream]
    assert events[-1].WhichOneof("event") == "account"


# -- policy ----------------------------------------------------------------------------------------


def weights(**fields: float) -> types_pb2.ObjectiveWeights:
    return types_pb2.ObjectiveWeights(**fields)


BAD_POLICIES = {
    "unknown": ({"policy": "round_robin"}, "Did you mean 'round-robin'?"),
    "no weights": ({"weights": weights()}, "at least one weight must be above 0"),
    "negative": ({"weights": weights(quality=-1, time=2)}, "not negative"),
    "nan": ({"weights": weights(quality=math.nan, time=1)}, "finite"),
    "infinite": ({"weights": weights(energy=math.inf)}, "finite"),
}


@pytest.mark.parametrize("name", BAD_POLICIES)
async def test_policy_or_weights_that_cannot_be_change_nothing(
    fleet: RunningFleet, name: str
) -> None:
    fields, words = BAD_POLICIES[name]
    before = await fleet.client.admin.GetPolicy(admin_pb2.GetPolicyRequest(), timeout=60)
    for call in (
        fleet.client.router.Route(
            router_pb2.RouteRequest(requests=[HELLO], **fields),  # type: ignore[arg-type]
            timeout=60,
        ),
        fleet.client.admin.SetPolicy(
            admin_pb2.SetPolicyRequest(**fields),  # type: ignore[arg-type]
            timeout=60,
        ),
        fleet.client.admin.SetPolicy(
            admin_pb2.SetPolicyRequest(normalisation="minmax", **fields),  # type: ignore[arg-type]
            timeout=60,
        ),
    ):
        failure = await failure_of(call)
        assert failure.code() is CODE.INVALID_ARGUMENT
        assert words in (failure.details() or "")
    after = await fleet.client.admin.GetPolicy(admin_pb2.GetPolicyRequest(), timeout=60)
    assert after == before


async def test_unknown_normalisation_changes_nothing_either(fleet: RunningFleet) -> None:
    before = await fleet.client.admin.GetPolicy(admin_pb2.GetPolicyRequest(), timeout=60)
    request = admin_pb2.SetPolicyRequest(policy="round-robin", normalisation="minmx")
    failure = await failure_of(fleet.client.admin.SetPolicy(request, timeout=60))
    assert failure.code() is CODE.INVALID_ARGUMENT
    assert "did you mean 'minmax'?" in (failure.details() or "")
    after = await fleet.client.admin.GetPolicy(admin_pb2.GetPolicyRequest(), timeout=60)
    assert after == before


async def test_policy_that_is_set_decides_from_the_next_batch_on(fleet: RunningFleet) -> None:
    before = await fleet.client.admin.GetPolicy(admin_pb2.GetPolicyRequest(), timeout=60)
    assert set(before.available_policies) >= {"memetic", "round-robin", "least-loaded"}
    request = admin_pb2.SetPolicyRequest(
        policy="round-robin", weights=weights(quality=3, time=1), normalisation="minmax"
    )
    changed_to = await fleet.client.admin.SetPolicy(request, timeout=60)
    assert (changed_to.policy, changed_to.normalisation) == ("round-robin", "minmax")
    assert changed_to.weights == weights(quality=0.75, time=0.25)
    _, account = await fleet.infer("Hello?")
    assert account.policy == "round-robin"
    await fleet.client.admin.SetPolicy(
        admin_pb2.SetPolicyRequest(
            policy=before.policy, weights=before.weights, normalisation=before.normalisation
        ),
        timeout=60,
    )


# -- the rest --------------------------------------------------------------------------------------


async def test_empty_batch_is_refused(fleet: RunningFleet) -> None:
    failure = await failure_of(fleet.client.router.Route(router_pb2.RouteRequest(), timeout=60))
    assert failure.code() is CODE.INVALID_ARGUMENT
    assert "at least one request" in (failure.details() or "")


async def test_unknown_node_lists_those_that_are_known(fleet: RunningFleet) -> None:
    admin = fleet.client.admin
    for call in (
        admin.DrainNode(admin_pb2.DrainNodeRequest(node_id="nano", is_draining=True), timeout=60),
        admin.ForgetNode(admin_pb2.ForgetNodeRequest(node_id="nano"), timeout=60),
    ):
        failure = await failure_of(call)
        assert failure.code() is CODE.NOT_FOUND
        assert failure.details() == "No node is called 'nano'. Known: pi, vm."


async def test_connected_node_is_not_forgotten(fleet: RunningFleet) -> None:
    request = admin_pb2.ForgetNodeRequest(node_id="pi")
    failure = await failure_of(fleet.client.admin.ForgetNode(request, timeout=60))
    assert failure.code() is CODE.FAILED_PRECONDITION
    assert "stop its agent first" in (failure.details() or "")


async def test_request_that_never_was_cannot_be_explained(fleet: RunningFleet) -> None:
    request = router_pb2.ExplainRequest(request_id="never")
    failure = await failure_of(fleet.client.router.Explain(request, timeout=60))
    assert failure.code() is CODE.NOT_FOUND
    assert "'never'" in (failure.details() or "")


async def test_unknown_method_is_unimplemented(fleet: RunningFleet) -> None:
    async with grpc.aio.insecure_channel(fleet.listening.grpc_address) as channel:
        call = channel.unary_unary("/pointsman.v1.RouterService/Guess")(b"", timeout=60)
        assert (await failure_of(call)).code() is CODE.UNIMPLEMENTED


async def test_fault_of_the_controllers_own_is_internal_and_tells_nothing(
    fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a secret")

    with monkeypatch.context() as patched:
        for name in ("nodes", "explain", "admitted"):
            patched.setattr(RouterService, name, fail)
        router, admin = fleet.client.router, fleet.client.admin
        for call in (
            admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=60),
            router.Explain(router_pb2.ExplainRequest(request_id="x"), timeout=60),
            router.Infer(router_pb2.InferRequest(request=HELLO), timeout=60),
        ):
            failure = await failure_of(call)
            assert failure.code() is CODE.INTERNAL
            assert "secret" not in (failure.details() or "")
            assert "its log says why" in (failure.details() or "")


# -- other fleets ----------------------------------------------------------------------------------


async def test_fleet_with_nobody_in_it_is_unavailable_and_not_busy(
    fleet: RunningFleet, tmp_path: Path
) -> None:
    async with running_fleet(tmp_path) as empty:
        failure = await infer_failure(empty, HELLO)
        assert failure.code() is CODE.UNAVAILABLE
        assert error_code(failure) == "no_destination"
        route = empty.client.router.Route(router_pb2.RouteRequest(requests=[HELLO]), timeout=60)
        assert (await failure_of(route)).code() is CODE.UNAVAILABLE
        failure = await infer_failure(empty, changed(model="fake-a"))
        assert failure.code() is CODE.NOT_FOUND
        models = await empty.client.router.ListModels(router_pb2.ListModelsRequest(), timeout=60)
        assert len(models.models) == 0


async def test_full_controller_is_busy_and_not_unavailable(
    fleet: RunningFleet, tmp_path: Path
) -> None:

    def slow(settings: EngineSettings) -> FakeEngine:
        return FakeEngine(settings, speeds=FakeSpeeds(decode_tokens_per_second=20.0))

    batching = BatchingSettings(window_seconds=0.5, quiet_seconds=0.0, max_waiting_requests=3)
    async with running_fleet(tmp_path, batching) as full:
        for name in ("a", "b"):
            await full.add_agent(name, make_engine=slow)
        calls = [
            full.client.router.Infer(infer_request(f"Question {i}?", max_tokens=2), timeout=60)
            for i in range(10)
        ]

        endings = await asyncio.gather(*(ending_of(call) for call in calls), return_exceptions=True)
        refused = [ending for ending in endings if isinstance(ending, grpc.aio.AioRpcError)]
        assert [error.code() for error in refused] == [CODE.RESOURCE_EXHAUSTED] * 7
        assert {error_code(error) for error in refused} == {"queue_full"}
        assert [ending for ending in endings if isinstance(ending, str)] == ["account"] * 3
