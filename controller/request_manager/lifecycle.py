"""The states of a request, and what each event makes of them.

| state      | event                   | next state | effects                                     |
| ---------- | ----------------------- | ---------- | ------------------------------------------- |
| Waiting    | WindowClosed            | Deciding   |                                             |
| Deciding   | Decided, a destination  | Dispatched | Note, TakeClaim, SendWork                   |
| Deciding   | Decided, none           | Ending     | Note, Fail                                  |
| Dispatched | NotSent                 | *again*    | Release, and of *again*                     |
| at a node  | Progress, nothing new   | the same   | Touch                                       |
| at a node  | Progress, the next part | Streaming  | Push                                        |
| at a node  | Progress, a later part  | *again*    | SendCancel, Release, and of *again*         |
| at a node  | AnswerFinished, whole   | Ending     | Release, Finish                             |
| at a node  | AnswerFinished, else    | *again*    | Release, and of *again*                     |
| at a node  | LinkLost, with grace    | Suspended  |                                             |
| at a node  | LinkLost, no grace left | *again*    | Release, and of *again*                     |
| Suspended  | LinkBack                | Reattached | SendResume                                  |
| Suspended  | GraceOver               | *again*    | Release, and of *again*                     |
| not over   | Broke                   | Ending     | Dequeue, or SendCancel, Release; Fail       |
| not ended  | GaveUp, Left            | Ended      | Dequeue, or SendCancel, Release; Close      |
| Ending     | Read                    | Ended      | Close                                       |

"At a node" is Dispatched, Streaming, Suspended and Reattached. Exactly these hold a claim, so each
`TakeClaim` is followed by one `Release`. "Not over" is all but Ending and Ended.

*Again* is Waiting with `Requeue` when the client has been shown nothing, attempts are left and
another node may do better. Otherwise it is Ending with `Fail`. A request that has shown something
never starts again: another model, or another draw of the same one, would not continue the text that
the client has.

Ignored, since the world can produce it at any time: what a node says of another dispatch than the
current one, or of none; what is decided of a request that is over; what the client does after the
end; a grace that ends early, or after the link is back. Everything else that the table lacks is a
fault of the controller: `IllegalMoveError`, with the story so far.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from controller.domain.batch import BatchDecision, Candidate, Placement
from controller.domain.completion import Completion, FailureKind, FinishReason, Usage
from controller.errors import (
    ContextExceededError,
    GenerationFailedError,
    InvalidRequestError,
    NodeLostError,
    RequestTimeoutError,
    RouterError,
)
from controller.ids import NodeId

# -- outcomes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer is whole."""

    completion: Completion


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client went away."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The answer will not come, for this reason; the message is the sentence the client reads."""

    error: type[RouterError]
    message: str


Outcome = Completed | Cancelled | RequestFailed

# -- states ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """In the window, for the first time or again."""


@dataclass(frozen=True, slots=True)
class Deciding:
    """Its window has closed, and its batch is being decided."""


class Dispatch(NamedTuple):
    """One dispatch, and how much of its answer the client has been given.

    Attributes:
        attempt: what it is called on the wire.
        characters: the length of that part.
        has_shown: whether anything came, be it a token without text.
    """

    node_id: NodeId
    attempt: int
    characters: int = 0
    has_shown: bool = False


@dataclass(frozen=True, slots=True)
class Dispatched:
    """At a node, which has shown nothing yet."""

    dispatch: Dispatch


@dataclass(frozen=True, slots=True)
class Streaming:
    """At a node, which writes the answer."""

    dispatch: Dispatch


@dataclass(frozen=True, slots=True)
class Suspended:
    """The link to the node is lost; the node may come back and go on.

    Attributes:
        why: the link was lost.
        until: monotonic seconds at which the grace ends.
    """

    dispatch: Dispatch
    why: str
    until: float


@dataclass(frozen=True, slots=True)
class Reattached:
    """The node is back and was asked for the rest; nothing of it has come yet."""

    dispatch: Dispatch


@dataclass(frozen=True, slots=True)
class Ending:
    """Nothing more happens at a node; the client has yet to read how it ended."""

    outcome: Completed | RequestFailed


@dataclass(frozen=True, slots=True)
class Ended:
    """Over."""

    outcome: Outcome


AtNode = Dispatched | Streaming | Suspended | Reattached
State = Waiting | Deciding | AtNode | Ending | Ended

AT_NODE: Final = (Streaming, Dispatched, Suspended, Reattached)
"""`AtNode` as `isinstance` takes it, the most frequent first."""

# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WindowClosed:
    """The request is in a batch."""


@dataclass(frozen=True, slots=True)
class Decided:
    """The batch is decided.

    Attributes:
        closed_at: monotonic seconds at which its window closed.
        refusal: why no destination takes the request, when none was chosen.
    """

    decision: BatchDecision
    placement: Placement
    closed_at: float
    refusal: RequestFailed | None = None


@dataclass(frozen=True, slots=True)
class NotSent:
    """The node went away between the decision's snapshot and the dispatch."""


@dataclass(frozen=True, slots=True)
class Broke:
    """The controller can do no more for the request: a fault of its own, or its end."""

    failure: RequestFailed


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The client's side ended the request with an error, or has read one."""

    failure: RequestFailed


@dataclass(frozen=True, slots=True)
class Left:
    """The client went away."""


@dataclass(frozen=True, slots=True)
class Read:
    """The client has read the whole answer."""


class Progress(NamedTuple):  # a dataclass takes three times as long, and there are thousands
    """A node made progress on a dispatch.

    Attributes:
        tokens: that the text stands for; no text and no token only says that it is alive.
        position: characters of the answer before this text; None when the node does not say, which
            is enough while the link holds.
    """

    node_id: NodeId
    attempt: int
    text: str
    tokens: int
    position: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerFinished:
    """A node's last word on a dispatch.

    Attributes:
        position: characters of the whole answer; None when the node does not say, which is enough
            while the link holds.
    """

    node_id: NodeId
    attempt: int
    completion: Completion
    position: int | None = None


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A node's session ended.

    Attributes:
        until: monotonic seconds up to which the node may come back; `now` or earlier is no grace.
    """

    node_id: NodeId
    why: str
    until: float


@dataclass(frozen=True, slots=True)
class LinkBack:
    """A node is back and still has the dispatch."""

    node_id: NodeId
    attempt: int


@dataclass(frozen=True, slots=True)
class GraceOver:
    """A timer that was set when the request was suspended has ended."""


Event = (
    WindowClosed
    | Decided
    | NotSent
    | Broke
    | GaveUp
    | Left
    | Read
    | Progress
    | AnswerFinished
    | LinkLost
    | LinkBack
    | GraceOver
)

# -- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dequeue:
    """Take it out of the window."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Put it into the window again: the client has been shown nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Remember what was decided."""

    decision: BatchDecision
    placement: Placement
    closed_at: float


@dataclass(frozen=True, slots=True)
class TakeClaim:
    """Count the request at its destination, before the order leaves."""

    chosen: Candidate


@dataclass(frozen=True, slots=True)
class SendWork:
    """Send the order, and tell the client where; `NotSent` follows when it cannot be sent."""

    chosen: Candidate
    attempt: int


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Have the node stop."""

    node_id: NodeId
    attempt: int


@dataclass(frozen=True, slots=True)
class SendResume:
    """Have the node stream the answer on from this character."""

    node_id: NodeId
    attempt: int
    position: int


@dataclass(frozen=True, slots=True)
class Release:
    """Count the request at its destination no more.

    Attributes:
        is_cancelled: the client went away, or the node cut the answer off.
        usage: what the node measured of a whole answer; None for every other end.
        was_cut: the answer reached its limit.
    """

    node_id: NodeId
    is_failure: bool = False
    is_cancelled: bool = False
    usage: Usage | None = None
    was_cut: bool = False


@dataclass(frozen=True, slots=True)
class Touch:
    """The engine is alive."""


class Push(NamedTuple):  # as Progress
    """Give this to the client."""

    node_id: NodeId
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Tell the client that the answer is whole."""

    completion: Completion


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the client that the answer will not come."""

    failure: RequestFailed


@dataclass(frozen=True, slots=True)
class Close:
    """Keep the record: the request is over."""

    outcome: Outcome


Effect = (
    Dequeue
    | Requeue
    | Note
    | TakeClaim
    | SendWork
    | SendCancel
    | SendResume
    | Release
    | Touch
    | Push
    | Finish
    | Fail
    | Close
)

# -- the machine ----------------------------------------------------------------------------------


class Moment(NamedTuple):
    """One move of a request: when, by which event, to which state."""

    at: float
    event: str
    state: str


class IllegalMoveError(Exception):
    """An event came that the request's state cannot take: a fault of the controller."""


class Life(NamedTuple):  # as Progress
    """A request's state, and what of its past still matters.

    Attributes:
        story: its moves so far, without prompts or answers.
        max_attempts: how often it may be dispatched.
        attempts: how often it was.
        earlier_attempts: dispatches of finished requests that had the same id. Attempts on the wire
            count on from there, since a node ignores what it has seen.
        excluded: nodes that failed it.
    """

    state: State
    story: tuple[Moment, ...]
    max_attempts: int
    attempts: int = 0
    earlier_attempts: int = 0
    excluded: frozenset[NodeId] = frozenset()


Step = tuple[Life, tuple[Effect, ...]]


def admitted(now: float, max_attempts: int, earlier_attempts: int = 0) -> Life:
    """A request that has just come; the caller puts it into the window."""
    story = (Moment(now, "Admitted", "Waiting"),)
    return Life(Waiting(), story, max_attempts, earlier_attempts=earlier_attempts)


def dispatch_of(state: State) -> Dispatch | None:
    """The dispatch that holds a claim; None when nothing is at a node."""
    return state.dispatch if isinstance(state, AT_NODE) else None


def step(life: Life, event: Event, now: float) -> Step:
    """What an event makes of a request, by the table above.

    Args:
        life: the request so far.
        event: what happened.
        now: monotonic seconds.

    Returns:
        The request afterwards, and what is to be done, in this order.

    Raises:
        IllegalMoveError: the request's state cannot take this event.
    """
    match event:
        case Progress():
            return _on_progress(life, event, now)
        case AnswerFinished():
            return _on_finished(life, event, now)
        case LinkLost() | LinkBack() | GraceOver():
            return _on_link(life, event, now)
        case GaveUp() | Left() | Read():
            return _on_client(life, event, now)
        case _:
            return _on_controller(life, event, now)


def _on_controller(life: Life, event: WindowClosed | Decided | NotSent | Broke, now: float) -> Step:
    match life.state, event:
        case Waiting(), WindowClosed():
            return _moved(life, Deciding(), event, now)
        case ((Ending() | Ended()), (Decided() | Broke())):
            return life, ()
        case Deciding(), Decided(decision, placement, closed_at, refusal):
            note, chosen = Note(decision, placement, closed_at), placement.chosen
            if chosen is not None:
                attempt = life.earlier_attempts + life.attempts + 1
                state = Dispatched(Dispatch(chosen.node_id, attempt))
                moved, _ = _moved(life, state, event, now, attempts=life.attempts + 1)
                return moved, (note, TakeClaim(chosen), SendWork(chosen, attempt))
            failure = refusal or RequestFailed(GenerationFailedError, "Nothing was chosen.")
            return _moved(life, Ending(failure), event, now, note, Fail(failure))
        case Dispatched(dispatch), NotSent():
            failure = RequestFailed(NodeLostError, "the node went away before it got the request")
            return _again(life, event, now, dispatch, failure, Release(dispatch.node_id, True))
        case state, Broke(failure):
            ending = (*_withdrawn(state, is_failure=True), Fail(failure))
            return _moved(life, Ending(failure), event, now, *ending)
        case _:
            raise _illegal(life, event, now)


def _on_client(life: Life, event: GaveUp | Left | Read, now: float) -> Step:
    match life.state, event:
        case Ended(), (GaveUp() | Left()):
            return life, ()
        case Ending(Completed() as outcome), Read():
            return _moved(life, Ended(outcome), event, now, Close(outcome))
        case state, GaveUp(failure):
            closing = (*_withdrawn(state, is_failure=True), Close(failure))
            return _moved(life, Ended(failure), event, now, *closing)
        case state, Left():
            left = Cancelled()
            closing = (*_withdrawn(state, is_cancelled=True), Close(left))
            return _moved(life, Ended(left), event, now, *closing)
        case _:
            raise _illegal(life, event, now)


def _on_progress(life: Life, event: Progress, now: float) -> Step:
    state = life.state
    if not isinstance(state, AT_NODE):
        return life, ()
    node_id, attempt, had, _ = state.dispatch
    if node_id != event.node_id or attempt != event.attempt:
        return life, ()
    if not event.text and not event.tokens:
        return life, (Touch(),)
    text, position = event.text, event.position
    if position is None and isinstance(state, (Streaming, Dispatched)):
        position = had  # while the link holds nothing is lost or repeated
    if position is None or position > had:
        failure = RequestFailed(NodeLostError, f"Node {node_id} lost a part of the answer.")
        gone = (SendCancel(node_id, attempt), Release(node_id, is_failure=True))
        return _again(life, event, now, state.dispatch, failure, *gone)
    if position < had:
        text = text[had - position :]
        if not text:
            return life, (Touch(),)  # the client has it already
    dispatch = Dispatch(node_id, attempt, had + len(text), True)
    push = Push(node_id, text, event.tokens)
    if type(state) is Streaming:  # no move worth telling, and there are thousands
        return _in(life, Streaming(dispatch)), (push,)
    return _moved(life, Streaming(dispatch), event, now, push)


def _on_finished(life: Life, event: AnswerFinished, now: float) -> Step:
    state, completion = life.state, event.completion
    if not isinstance(state, AT_NODE):
        return life, ()
    dispatch = state.dispatch
    if (dispatch.node_id, dispatch.attempt) != (event.node_id, event.attempt):
        return life, ()
    reason, node_id = completion.reason, dispatch.node_id
    if reason is FinishReason.CANCELLED:
        # Nobody here asked for it: the node stopped, or lost the link for a moment.
        failure = RequestFailed(
            GenerationFailedError, completion.message or "the node cut the answer off"
        )
        return _again(life, event, now, dispatch, failure, Release(node_id, is_cancelled=True))
    if reason is FinishReason.FAILED:
        kind = completion.failure or FailureKind.INTERNAL
        failure = RequestFailed(_error_of(kind), completion.message or kind.value.replace("_", " "))
        gone = Release(node_id, is_failure=True)
        return _again(life, event, now, dispatch, failure, gone, may_move=kind.may_move)
    is_sure = isinstance(state, (Dispatched, Streaming)) and event.position is None
    if not is_sure and event.position != dispatch.characters:
        failure = RequestFailed(NodeLostError, f"Node {node_id} lost a part of the answer.")
        return _again(life, event, now, dispatch, failure, Release(node_id, is_failure=True))
    release = Release(node_id, usage=completion.usage, was_cut=reason is FinishReason.LENGTH)
    return _moved(life, Ending(Completed(completion)), event, now, release, Finish(completion))


def _on_link(life: Life, event: LinkLost | LinkBack | GraceOver, now: float) -> Step:
    state = life.state
    if not isinstance(state, AT_NODE):
        return life, ()
    dispatch = state.dispatch
    match event, state:
        case LinkLost(node_id, why, until), _ if node_id == dispatch.node_id:
            if until > now:
                if isinstance(state, Suspended):
                    return life, ()  # the first loss set the grace
                return _moved(life, Suspended(dispatch, why, until), event, now)
            return _lost(life, event, now, dispatch, why)
        case LinkBack(node_id, attempt), Suspended() if (node_id, attempt) == dispatch[:2]:
            resume = SendResume(node_id, attempt, dispatch.characters)
            return _moved(life, Reattached(dispatch), event, now, resume)
        case GraceOver(), Suspended(why=why, until=until) if now >= until:
            return _lost(life, event, now, dispatch, why)
        case _:
            return life, ()


def _lost(life: Life, event: Event, now: float, dispatch: Dispatch, why: str) -> Step:
    failure = RequestFailed(NodeLostError, f"node {dispatch.node_id} was lost: {why}")
    return _again(life, event, now, dispatch, failure, Release(dispatch.node_id, is_failure=True))


def may_start_again(has_shown: bool, attempts: int, max_attempts: int) -> bool:
    """Whether a request that its node does not finish may start again, unseen by the client."""
    return not has_shown and attempts < max_attempts


def _again(
    life: Life,
    event: Event,
    now: float,
    dispatch: Dispatch,
    failure: RequestFailed,
    *before: Effect,
    may_move: bool = True,
) -> Step:
    if may_move and may_start_again(dispatch.has_shown, life.attempts, life.max_attempts):
        requeue = Requeue(failure.message)
        excluded = life.excluded | {dispatch.node_id}
        moved, _ = _moved(life, Waiting(), event, now, excluded=excluded)
        return moved, (*before, requeue)
    return _moved(life, Ending(failure), event, now, *before, Fail(failure))


def _withdrawn(
    state: State, *, is_failure: bool = False, is_cancelled: bool = False
) -> tuple[Effect, ...]:
    """What takes a request away from where it is."""
    if isinstance(state, Waiting):
        return (Dequeue(),)
    dispatch = dispatch_of(state)
    if dispatch is None:
        return ()
    node_id, attempt = dispatch.node_id, dispatch.attempt
    return SendCancel(node_id, attempt), Release(node_id, is_failure, is_cancelled)


def _moved(
    life: Life,
    state: State,
    event: Event,
    now: float,
    *effects: Effect,
    attempts: int | None = None,
    excluded: frozenset[NodeId] | None = None,
) -> Step:
    moment = Moment(now, type(event).__name__, type(state).__name__)
    moved = Life(
        state,
        (*life.story, moment),
        life.max_attempts,
        life.attempts if attempts is None else attempts,
        life.earlier_attempts,
        life.excluded if excluded is None else excluded,
    )
    return moved, effects


def _in(life: Life, state: State) -> Life:
    return Life(
        state,
        life.story,
        life.max_attempts,
        life.attempts,
        life.earlier_attempts,
        life.excluded,
    )


def _illegal(life: Life, event: Event, now: float) -> IllegalMoveError:
    start = life.story[0].at
    moments = (*life.story, Moment(now, type(event).__name__, "?"))
    story = ", ".join(f"{m.at - start:.3f} s {m.event} -> {m.state}" for m in moments)
    state = type(life.state).__name__
    return IllegalMoveError(f"{state} cannot take {type(event).__name__}: {story}")


def _error_of(kind: FailureKind) -> type[RouterError]:
    match kind:
        case FailureKind.INVALID_REQUEST:
            return InvalidRequestError
        case FailureKind.CONTEXT_EXCEEDED:
            return ContextExceededError
        case FailureKind.TIME_LIMIT:
            return RequestTimeoutError
        case _:
            return GenerationFailedError
