"""Asks one question of the fleet by the public API, repeats what may help, and tells the score."""

import asyncio
from dataclasses import dataclass
from typing import Final

import grpc

from controller.client import Client
from controller.lab.offline.fleet_view import FleetView, ProfiledTarget
from controller.lab.offline.questions import Question
from pointsman.v1 import router_pb2, types_pb2

MAX_ATTEMPTS: Final = 3
_PAUSE_SECONDS: Final = 1.0
_CALL_SECONDS: Final = 10.0
_HOPELESS: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)
"""Of a destination that is ready: the same request would be refused again."""


class TargetGoneError(Exception):
    """A destination was not ready for as long as it was waited for."""


@dataclass(frozen=True, slots=True)
class Sending:
    """How all questions of a run are sent.

    Attributes:
        max_tokens: of a question that gives none.
        seed: of the sampling; the temperature is 0.
        timeout_seconds: for one answer.
        node_wait_seconds: how long a node that goes away is waited for.
    """

    max_tokens: int
    seed: int
    timeout_seconds: float
    node_wait_seconds: float

    def max_tokens_of(self, question: Question) -> int:
        """Greatest length of this question's answer."""
        return self.max_tokens if question.max_tokens is None else question.max_tokens


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that came to its end."""

    text: str
    account: router_pb2.Account
    attempts: int


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A question that nobody answered, and the last reason."""

    error: str
    attempts: int


def request_for(
    question: Question, sending: Sending, target: ProfiledTarget | None, takes_chats: bool = True
) -> types_pb2.InferenceRequest:
    """What is sent: greedy, with a fixed seed, and pinned if there is a target.

    Args:
        question: whose turns are sent as a chat.
        sending: of the run.
        target: None lets the controller choose node and model.
        takes_chats: False sends the turns as a raw prompt, for a model without chat template.
    """
    request = types_pb2.InferenceRequest(
        model=target.model if target else "",
        sampling=types_pb2.SamplingParameters(
            max_tokens=sending.max_tokens_of(question), temperature=0.0, seed=sending.seed
        ),
        constraints=types_pb2.RequestConstraints(node_id=target.node_id if target else ""),
    )
    if takes_chats:
        request.chat.messages.extend(
            types_pb2.ChatMessage(role=message.role, content=message.content)
            for message in question.messages
        )
    else:
        request.prompt = question.text
    return request


async def ask_patiently(
    client: Client,
    fleet: FleetView,
    question: Question,
    sending: Sending,
    target: ProfiledTarget | None,
) -> Answered | Unanswered:
    """The answer, asked for a few times if need be.

    Raises:
        TargetGoneError: the target was not ready for `node_wait_seconds`.
    """
    error = ""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        if target is not None and not await fleet.wait_until_ready(
            target, sending.node_wait_seconds
        ):
            raise TargetGoneError(str(target))
        takes_chats = target is None or fleet.model(target).has_chat_template
        request = request_for(question, sending, target, takes_chats)
        try:
            text, account = await _ask(client, request, sending.timeout_seconds)
        except grpc.aio.AioRpcError as caught:
            error = f"{caught.code().name}: {caught.details() or 'no reason was given'}"
            await fleet.refresh()
            is_there = target is None or fleet.is_ready(target)
            if is_there and caught.code() in _HOPELESS:
                return Unanswered(error, attempt)
        else:
            if account is not None and account.finish_reason in (
                types_pb2.FINISH_REASON_STOP,
                types_pb2.FINISH_REASON_LENGTH,
            ):
                return Answered(text, account, attempt)
            error = "the answer ended before its end"
        if attempt < MAX_ATTEMPTS:
            await asyncio.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1))
    return Unanswered(error, MAX_ATTEMPTS)


async def _ask(
    client: Client, request: types_pb2.InferenceRequest, timeout: float
) -> tuple[str, router_pb2.Account | None]:
    pieces: list[str] = []
    stream = client.router.Infer(router_pb2.InferRequest(request=request), timeout=timeout)
    async for event in stream:
        match event.WhichOneof("event"):
            case "text":
                pieces.append(event.text.text)
            case "account":
                return "".join(pieces), event.account
    return "".join(pieces), None


class Teacher:
    """Gives scores to the controller, so that it routes by them from then on.

    Args:
        client: of the controller.
        is_teaching: False gives none.
    """

    def __init__(self, client: Client, is_teaching: bool) -> None:
        self._client = client
        self._is_teaching = is_teaching
        self.taught = 0
        self.refusal = ""

    async def teach(self, request_id: str, score_ratio: float | None) -> None:
        """Give one score; a controller that does not learn only leaves a `refusal`."""
        if score_ratio is None or not self._is_teaching:
            return
        message = router_pb2.FeedbackRequest(request_id=request_id, score_ratio=score_ratio)
        try:
            await self._client.router.Feedback(message, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            self.refusal = error.details() or error.code().name
        else:
            self.taught += 1


async def batch_size(client: Client, request_id: str) -> int | None:
    """How many requests were decided together with this one; None when it is not known."""
    try:
        explained = await client.router.Explain(
            router_pb2.ExplainRequest(request_id=request_id), timeout=_CALL_SECONDS
        )
    except grpc.aio.AioRpcError:
        return None
    return explained.decision.batch_size if explained.HasField("decision") else None
