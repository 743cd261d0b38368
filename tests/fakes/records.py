"""Finished requests for tests of what is kept."""

from controller.domain.batch import BatchDecision, Candidate, Placement, Weights
from controller.domain.completion import Completion, FinishReason, Usage
from controller.domain.refusal import Refusal, RefusalReason
from controller.domain.request import ChatMessage, InferenceRequest
from controller.domain.request_record import Account, RequestRecord, RequestState
from controller.ids import BatchId, ModelName, NodeId, RequestId

REFUSALS = (
    Refusal(RefusalReason.OTHER_MODEL, ("small", "large")),
    Refusal(RefusalReason.CONTEXT_TOO_SMALL, (110.25, 5.0, 100.0)),
)


def candidate(
    node: str = "pi-1", model: str = "small", refusals: tuple[Refusal, ...] = ()
) -> Candidate:
    return Candidate(
        NodeId(node),
        ModelName(model),
        0.7,
        "prior",
        0.001,
        12.5,
        2.0,
        1.5,
        0.01,
        40.0,
        2.2,
        refusals,
    )


def finished_record(
    request_id: str = "r-1", prompt: str = "What is 2 + 2?", others: int = 3
) -> RequestRecord:
    usage = Usage(12, 34, 0.1, 0.2, 1.7, 11.0, "rapl", 2.0, 9.0, 4)
    record = RequestRecord(
        InferenceRequest(RequestId(request_id), (ChatMessage("user", prompt),), session_id="s"),
        admitted_time=1_700_000_000.0,
        admitted_at=5.0,
        state=RequestState.COMPLETED,
        decision=BatchDecision(
            BatchId("b-1"),
            "memetic",
            Weights(),
            "payoff",
            0.3,
            0.001,
            12.5,
            2.2,
            0.4,
            0.39,
            0.01,
            1,
        ),
        placement=Placement(
            RequestId(request_id),
            candidate(),
            tuple(candidate(f"pi-{k + 2}", refusals=REFUSALS[: k % 3]) for k in range(others)),
        ),
        closed_at=6.0,
        first_token_at=6.5,
        tokens_sent=34,
        attempts=1,
    )
    record.account = Account(
        RequestId(request_id),
        BatchId("b"),
        NodeId("pi-1"),
        ModelName("small"),
        "memetic",
        Completion(FinishReason.STOP, usage),
        1.0,
        1.5,
        3.1,
        2.2,
        2.1,
        0.001,
        1,
    )
    return record
