"""What a profiling run sends, so that the same questions are asked in the same way again."""

from typing import Any, cast

import grpc
import pytest

from controller.client import Client
from controller.domain.request import ChatMessage
from controller.lab.offline.fleet_view import FleetView, ProfiledTarget
from controller.lab.offline.graders import Grader, Key
from controller.lab.offline.question_sender import (
    MAX_ATTEMPTS,
    Answered,
    Sending,
    TargetGoneError,
    Teacher,
    Unanswered,
    ask_patiently,
    request_for,
)
from controller.lab.offline.questions import Question
from pointsman.v1 import fleet_pb2, router_pb2, types_pb2

pytestmark = pytest.mark.anyio

SENDING = Sending(max_tokens=96, seed=22, timeout_seconds=5.0, node_wait_seconds=1.0)
TARGET = ProfiledTarget("pi", "small")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.lab.offline.question_sender._PAUSE_SECONDS", 0.0)


def question(max_tokens: int | None = None) -> Question:
    turns = (ChatMessage("system", "Be brief."), ChatMessage("user", "What is 2 + 2?"))
    return Question("sums", "1", "sums", turns, Key(Grader.NONE, ()), max_tokens)


def test_requests_are_greedy_of_one_seed_and_pinned() -> None:
    request = request_for(question(), SENDING, TARGET)
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, 22)
    assert request.sampling.HasField("temperature"), "0 is not the default"
    assert request.sampling.max_tokens == 96
    assert (request.model, request.constraints.node_id) == ("small", "pi")
    assert [turn.role for turn in request.chat.messages] == ["system", "user"]


def test_question_may_say_how_long_its_answer_is() -> None:
    assert request_for(question(12), SENDING, TARGET).sampling.max_tokens == 12


def test_routed_request_names_no_destination() -> None:
    request = request_for(question(), SENDING, None)
    assert (request.model, request.constraints.node_id) == ("", "")


def test_model_without_a_chat_template_gets_the_text() -> None:
    request = request_for(question(), SENDING, TARGET, takes_chats=False)
    assert request.prompt == question().text
    assert not request.HasField("chat")


class RefusedError(grpc.aio.AioRpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "why")


class Script:
    """A client and a fleet in one, which answer as they are told; errors come before answers."""

    def __init__(self, *events: grpc.StatusCode | str, is_ready: bool = True) -> None:
        self.events = list(events)
        self.asked = 0
        self.scores: list[float] = []
        self._is_ready = is_ready
        self.router = self

    async def Infer(self, message: Any, timeout: float) -> Any:  # noqa: N802 - the RPC's name
        self.asked += 1
        event = self.events.pop(0)
        if isinstance(event, grpc.StatusCode):
            raise RefusedError(event)
        yield router_pb2.InferResponse(text=router_pb2.TextDelta(text=event))
        reason = types_pb2.FINISH_REASON_STOP
        yield router_pb2.InferResponse(account=router_pb2.Account(finish_reason=reason))

    async def Feedback(self, message: Any, timeout: float) -> None:  # noqa: N802
        event = self.events.pop(0)
        if isinstance(event, grpc.StatusCode):
            raise RefusedError(event)
        self.scores.append(message.score_ratio)

    async def wait_until_ready(self, target: ProfiledTarget, seconds: float) -> bool:
        return self._is_ready

    def is_ready(self, target: ProfiledTarget) -> bool:
        return self._is_ready

    def model(self, target: ProfiledTarget) -> fleet_pb2.ModelState:
        return fleet_pb2.ModelState(has_chat_template=True)

    async def refresh(self) -> None:
        pass


async def ask(script: Script) -> Answered | Unanswered:
    fleet = cast(FleetView, script)
    return await ask_patiently(cast(Client, script), fleet, question(), SENDING, TARGET)


async def test_what_may_go_better_is_asked_again() -> None:
    script = Script(grpc.StatusCode.UNAVAILABLE, "4")
    found = await ask(script)
    assert isinstance(found, Answered)
    assert (found.text, found.attempts, script.asked) == ("4", 2, 2)


async def test_what_is_refused_is_not_asked_again() -> None:
    script = Script(grpc.StatusCode.OUT_OF_RANGE)
    assert await ask(script) == Unanswered("OUT_OF_RANGE: why", 1)


async def test_question_is_given_up_after_the_last_attempt() -> None:
    script = Script(*[grpc.StatusCode.UNAVAILABLE] * MAX_ATTEMPTS)
    assert await ask(script) == Unanswered("UNAVAILABLE: why", MAX_ATTEMPTS)


async def test_destination_that_does_not_come_back_is_told() -> None:
    with pytest.raises(TargetGoneError, match="pi/small"):
        await ask(Script("4", is_ready=False))


async def test_scores_are_counted_and_a_refusal_is_kept() -> None:
    script = Script("taken", grpc.StatusCode.INVALID_ARGUMENT)
    teacher = Teacher(cast(Client, script), is_teaching=True)
    await teacher.teach("r0", None)  # nothing to grade by
    await teacher.teach("r1", 0.5)
    await teacher.teach("r2", 1.0)
    assert (teacher.taught, teacher.refusal, script.scores) == (1, "why", [0.5])
    silent = Teacher(cast(Client, Script()), is_teaching=False)
    await silent.teach("r1", 0.5)
    assert (silent.taught, silent.refusal) == (0, "")
