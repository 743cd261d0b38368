"""The states of a request, driven without a loop."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.domain.batch import BatchDecision, Candidate, Placement, Weights
from controller.domain.completion import Completion, FailureKind, FinishReason, Usage
from controller.errors import (
    ContextExceededError,
    GenerationFailedError,
    InvalidRequestError,
    NodeLostError,
    NoDestinationError,
    RequestTimeoutError,
    SlowReaderError,
)
from controller.ids import BatchId, ModelName, NodeId, RequestId
from controller.request_manager.lifecycle import (
    AT_NODE,
    AnswerFinished,
    Broke,
    Cancelled,
    Close,
    Completed,
    Decided,
    Dequeue,
    Dispatch,
    Dispatched,
    Effect,
    Ended,
    Ending,
    Event,
    Fail,
    Finish,
    GaveUp,
    GraceOver,
    IllegalMoveError,
    Left,
    Life,
    LinkBack,
    LinkLost,
    Note,
    NotSent,
    Progress,
    Push,
    Read,
    Reattached,
    Release,
    RequestFailed,
    Requeue,
    SendCancel,
    SendResume,
    SendWork,
    State,
    Streaming,
    Suspended,
    TakeClaim,
    Touch,
    Waiting,
    WindowClosed,
    admitted,
    dispatch_of,
    step,
)

PI, VM = NodeId("pi"), NodeId("vm")
WHOLE = Completion(FinishReason.STOP, Usage(3, 4))
SLOW = RequestFailed(SlowReaderError, "too slow")
MOVABLE = {
    FailureKind.MODEL_NOT_LOADED,
    FailureKind.DRAINING,
    FailureKind.QUEUE_FULL,
    FailureKind.ENGINE_CRASHED,
}
DECISION = BatchDecision(
    BatchId("b-1"), "memetic", Weights(), "payoff", 0.0, 0.0, 0.0, 0.0, 0.0, None, 0.0, 1
)


def candidate(node_id: NodeId = PI) -> Candidate:
    return Candidate(node_id, ModelName("small"), 0.5, "prior", 0.0, 1.0, 2.0, 2.0, 0.01, 50.0, 2.0)


def decided(node_id: NodeId | None = PI, refusal: RequestFailed | None = None) -> Decided:
    chosen = None if node_id is None else candidate(node_id)
    return Decided(DECISION, Placement(RequestId("r"), chosen, ()), 1.0, refusal)


def after(*events: Event, max_attempts: int = 3, earlier_attempts: int = 0) -> Life:
    """A request to which this has happened, a second apart."""
    life = admitted(0.0, max_attempts, earlier_attempts)
    for now, event in enumerate(events, 1):
        life, _ = step(life, event, float(now))
    return life


def then(life: Life, event: Event, now: float = 10.0) -> tuple[State, tuple[Effect, ...]]:
    moved, effects = step(life, event, now)
    return moved.state, effects


DISPATCHED = (WindowClosed(), decided())
STREAMING = (*DISPATCHED, Progress(PI, 1, "Hi", 1))
SUSPENDED = (*STREAMING, LinkLost(PI, "power cut", 30.0))
REATTACHED = (*SUSPENDED, LinkBack(PI, 1))


# -- the way of a request --------------------------------------------------------------------------


def test_claim_goes_before_the_order_and_the_decision_before_both() -> None:
    state, effects = then(after(WindowClosed()), decided())
    assert state == Dispatched(Dispatch(PI, 1))
    assert effects == (
        Note(DECISION, decided().placement, 1.0),
        TakeClaim(candidate()),
        SendWork(candidate(), 1),
    )


def test_attempts_on_the_wire_count_on_over_every_use_of_an_id() -> None:
    life = after(WindowClosed(), decided(), earlier_attempts=4)
    assert (life.attempts, dispatch_of(life.state)) == (1, Dispatch(PI, 5))


def test_whole_answer_is_pushed_finished_and_closed_once_it_is_read() -> None:
    life, effects = step(after(*DISPATCHED), Progress(PI, 1, "Hi", 1), 3.0)
    assert effects == (Push(PI, "Hi", 1),)
    assert life.state == Streaming(Dispatch(PI, 1, 2, True))
    life, effects = step(life, AnswerFinished(PI, 1, WHOLE), 4.0)
    assert effects == (Release(PI, usage=WHOLE.usage), Finish(WHOLE))
    assert life.state == Ending(Completed(WHOLE))
    life, effects = step(life, Read(), 5.0)
    assert (life.state, effects) == (Ended(Completed(WHOLE)), (Close(Completed(WHOLE)),))


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_completed_answer_finishes(reason: FinishReason) -> None:
    completion = Completion(reason, Usage(3, 4))
    state, effects = then(after(*STREAMING), AnswerFinished(PI, 1, completion))
    assert state == Ending(Completed(completion))
    cut = reason is FinishReason.LENGTH
    assert effects == (Release(PI, usage=completion.usage, was_cut=cut), Finish(completion))


def test_story_has_every_move_with_its_time_and_no_text() -> None:
    life = after(*STREAMING, Progress(PI, 1, "secret", 1), AnswerFinished(PI, 1, WHOLE))
    assert [(m.at, m.event, m.state) for m in life.story] == [
        (0.0, "Admitted", "Waiting"),
        (1.0, "WindowClosed", "Deciding"),
        (2.0, "Decided", "Dispatched"),
        (3.0, "Progress", "Streaming"),
        (5.0, "AnswerFinished", "Ending"),
    ]


# -- no destination, and the controller itself -----------------------------------------------------


def test_refused_request_is_noted_and_told_why() -> None:
    nobody = RequestFailed(NoDestinationError, "nobody")
    state, effects = then(after(WindowClosed()), decided(None, nobody))
    assert state == Ending(nobody)
    assert effects == (Note(DECISION, decided(None).placement, 1.0), Fail(nobody))


def test_node_that_went_before_it_got_the_request_is_planned_around() -> None:
    life, effects = step(after(*DISPATCHED), NotSent(), 3.0)
    assert life.state == Waiting()
    assert life.excluded == {PI}
    assert effects == (
        Release(PI, is_failure=True),
        Requeue("the node went away before it got the request"),
    )


@pytest.mark.parametrize(
    ("events", "withdrawn"),
    [
        ((), (Dequeue(),)),
        ((WindowClosed(),), ()),
        (DISPATCHED, (SendCancel(PI, 1), Release(PI, is_failure=True))),
        (STREAMING, (SendCancel(PI, 1), Release(PI, is_failure=True))),
        (SUSPENDED, (SendCancel(PI, 1), Release(PI, is_failure=True))),
        (REATTACHED, (SendCancel(PI, 1), Release(PI, is_failure=True))),
    ],
)
def test_controller_and_client_can_end_a_request_anywhere(
    events: tuple[Event, ...], withdrawn: tuple[Effect, ...]
) -> None:
    life = after(*events)
    assert then(life, Broke(SLOW)) == (Ending(SLOW), (*withdrawn, Fail(SLOW)))
    assert then(life, GaveUp(SLOW)) == (Ended(SLOW), (*withdrawn, Close(SLOW)))
    left = tuple(
        Release(PI, is_cancelled=True) if isinstance(effect, Release) else effect
        for effect in withdrawn
    )
    assert then(life, Left()) == (Ended(Cancelled()), (*left, Close(Cancelled())))


def test_client_that_leaves_before_it_reads_the_end_has_cancelled() -> None:
    life = after(*STREAMING, AnswerFinished(PI, 1, WHOLE))
    assert then(life, Left()) == (Ended(Cancelled()), (Close(Cancelled()),))


# -- again or not ----------------------------------------------------------------------------------


def failed(kind: FailureKind | None, message: str = "") -> AnswerFinished:
    return AnswerFinished(PI, 1, Completion(FinishReason.FAILED, Usage(), kind, message))


@pytest.mark.parametrize("kind", FailureKind)
def test_only_failures_that_may_go_better_elsewhere_move(kind: FailureKind) -> None:
    state, (release, last) = then(after(*DISPATCHED), failed(kind, "why"))
    assert release == Release(PI, is_failure=True)
    if kind in MOVABLE:
        assert (state, last) == (Waiting(), Requeue("why"))
    else:
        assert isinstance(last, Fail)
        assert state == Ending(last.failure)
        assert last.failure.message == "why"


@pytest.mark.parametrize("kind", FailureKind)
def test_request_that_streamed_tokens_never_starts_again(kind: FailureKind) -> None:
    state, (_, last) = then(after(*STREAMING), failed(kind, "why"))
    assert isinstance(state, Ending)
    assert isinstance(last, Fail)


def test_failure_is_told_in_its_kind() -> None:
    told = {
        FailureKind.INVALID_REQUEST: InvalidRequestError,
        FailureKind.CONTEXT_EXCEEDED: ContextExceededError,
        FailureKind.TIME_LIMIT: RequestTimeoutError,
        FailureKind.INTERNAL: GenerationFailedError,
    }
    for kind, error in told.items():
        state, _ = then(after(*STREAMING), failed(kind, "why"))
        assert state == Ending(RequestFailed(error, "why"))


@pytest.mark.parametrize("events", [DISPATCHED, STREAMING])
def test_answer_that_the_node_itself_cut_off_is_not_a_finished_one(
    events: tuple[Event, ...],
) -> None:
    """Nobody asked to cancel, since a cancelled request is not current any more."""
    cut = AnswerFinished(PI, 1, Completion(FinishReason.CANCELLED, Usage(3, 4)))
    state, (release, last) = then(after(*events), cut)
    assert release == Release(PI, is_cancelled=True)
    assert isinstance(last, Fail if events is STREAMING else Requeue)
    assert isinstance(state, Ending if events is STREAMING else Waiting)


def test_failure_without_a_kind_or_a_message_is_still_told() -> None:
    state, _ = then(after(*DISPATCHED), failed(None))
    assert state == Ending(RequestFailed(GenerationFailedError, "internal"))
    once = after(*DISPATCHED, max_attempts=1)
    state, _ = then(once, failed(FailureKind.QUEUE_FULL))
    assert state == Ending(RequestFailed(GenerationFailedError, "queue full"))


def test_lost_node_moves_what_was_not_shown_and_fails_what_was() -> None:
    lost = LinkLost(PI, "power cut", 0.0)
    why = "node pi was lost: power cut"
    release = Release(PI, is_failure=True)
    assert then(after(*DISPATCHED), lost) == (Waiting(), (release, Requeue(why)))
    failure = RequestFailed(NodeLostError, why)
    assert then(after(*STREAMING), lost) == (Ending(failure), (release, Fail(failure)))


@pytest.mark.parametrize(("text", "tokens"), [("Hi", 0), ("", 1)])
def test_text_without_a_token_and_a_token_without_text_have_both_been_shown(
    text: str, tokens: int
) -> None:
    life = after(*DISPATCHED, Progress(PI, 1, text, tokens))
    state, _ = then(life, LinkLost(PI, "power cut", 0.0))
    assert isinstance(state, Ending)


@given(st.integers(1, 6), st.sampled_from(sorted(MOVABLE, key=str)))
def test_request_is_dispatched_at_most_max_attempts_times(
    max_attempts: int, kind: FailureKind
) -> None:
    for ending in (
        lambda attempt: AnswerFinished(PI, attempt, Completion(FinishReason.FAILED, Usage(), kind)),
        lambda attempt: LinkLost(PI, "lost", 0.0),
    ):
        life, dispatches = admitted(0.0, max_attempts), 0
        while not isinstance(life.state, Ending):
            for event in (WindowClosed(), decided()):
                life, _ = step(life, event, 1.0)
            dispatches += 1
            life, _ = step(life, ending(dispatches), 1.0)
        assert dispatches == life.attempts == max_attempts


# -- a link that comes back ------------------------------------------------------------------------


def test_lost_link_suspends_a_request_for_its_grace() -> None:
    life, effects = step(after(*STREAMING), LinkLost(PI, "power cut", 30.0), 4.0)
    assert (life.state, effects) == (Suspended(Dispatch(PI, 1, 2, True), "power cut", 30.0), ())
    again = LinkLost(PI, "again", 90.0)
    assert step(life, again, 5.0) == (life, ()), "the first loss set the grace"


def test_node_that_is_back_in_time_goes_on_where_the_client_is() -> None:
    life, effects = step(after(*SUSPENDED), LinkBack(PI, 1), 5.0)
    assert (life.state, effects) == (
        Reattached(Dispatch(PI, 1, 2, True)),
        (SendResume(PI, 1, position=2),),
    )
    life, effects = step(life, Progress(PI, 1, " there", 1, position=2), 6.0)
    assert (life.state, effects) == (
        Streaming(Dispatch(PI, 1, 8, True)),
        (Push(PI, " there", 1),),
    )


def test_text_that_comes_again_is_given_once() -> None:
    life = after(*REATTACHED)
    assert then(life, Progress(PI, 1, "Hi", 1, position=0)) == (life.state, (Touch(),))
    assert then(life, Progress(PI, 1, "Hi there", 3, position=0))[1] == (Push(PI, " there", 3),)


@pytest.mark.parametrize("position", [3, None])
def test_text_with_a_gap_before_it_fails_the_request(position: int | None) -> None:
    state, effects = then(after(*REATTACHED), Progress(PI, 1, "x", 1, position))
    lost = RequestFailed(NodeLostError, "Node pi lost a part of the answer.")
    assert state == Ending(lost)
    assert effects == (SendCancel(PI, 1), Release(PI, is_failure=True), Fail(lost))


@pytest.mark.parametrize(("position", "is_whole"), [(2, True), (3, False), (None, False)])
@pytest.mark.parametrize("events", [SUSPENDED, REATTACHED])
def test_last_word_after_a_lost_link_counts_only_with_the_whole_answer(
    events: tuple[Event, ...], position: int | None, is_whole: bool
) -> None:
    state, _ = then(after(*events), AnswerFinished(PI, 1, WHOLE, position))
    assert isinstance(state, Ending)
    assert isinstance(state.outcome, Completed if is_whole else RequestFailed)


def test_grace_that_ends_lets_the_node_go() -> None:
    life = after(*SUSPENDED)
    assert step(life, GraceOver(), 29.0) == (life, ())
    failure = RequestFailed(NodeLostError, "node pi was lost: power cut")
    release = Release(PI, is_failure=True)
    assert then(life, GraceOver(), 30.0) == (Ending(failure), (release, Fail(failure)))
    unseen = after(*DISPATCHED, LinkLost(PI, "power cut", 30.0))
    state, effects = then(unseen, GraceOver(), 30.0)
    assert (state, effects) == (Waiting(), (release, Requeue(failure.message)))


def test_timer_of_a_grace_that_was_not_needed_changes_nothing() -> None:
    life = after(*REATTACHED)
    assert step(life, GraceOver(), 99.0) == (life, ())


# -- what is not current, and what cannot be -------------------------------------------------------


@pytest.mark.parametrize(("node_id", "attempt"), [(VM, 1), (PI, 2), (PI, 0)])
@pytest.mark.parametrize("events", [DISPATCHED, STREAMING, SUSPENDED, REATTACHED])
def test_words_about_another_dispatch_are_ignored(
    events: tuple[Event, ...], node_id: NodeId, attempt: int
) -> None:
    life = after(*events)
    others: tuple[Event, ...] = (
        Progress(node_id, attempt, "wrong", 1),
        AnswerFinished(node_id, attempt, WHOLE),
        LinkBack(node_id, attempt),
    )
    for event in others:
        assert step(life, event, 10.0) == (life, ())
    assert step(life, LinkLost(VM, "another's", 0.0), 10.0) == (life, ())


@pytest.mark.parametrize(
    ("events", "event"),
    [
        ((), decided()),
        ((), Read()),
        ((WindowClosed(),), WindowClosed()),
        ((WindowClosed(),), NotSent()),
        (DISPATCHED, decided()),
        (STREAMING, NotSent()),
        (STREAMING, Read()),
        ((Broke(SLOW),), Read()),
        ((Left(),), Read()),
        ((Left(),), WindowClosed()),
    ],
)
def test_illegal_move_is_an_error_that_tells_the_story(
    events: tuple[Event, ...], event: Event
) -> None:
    life = after(*events)
    with pytest.raises(IllegalMoveError, match=r"0\.000 s Admitted -> Waiting") as told:
        step(life, event, 10.0)
    state = type(life.state).__name__
    assert str(told.value).startswith(f"{state} cannot take {type(event).__name__}: ")
    assert f"10.000 s {type(event).__name__} -> ?" in str(told.value)


# -- any order -------------------------------------------------------------------------------------


@dataclass
class Node:
    """A node that answers, loses its link and goes on where it is asked to."""

    attempt: int
    text: str = ""
    is_linked: bool = True
    knows_positions: bool = True
    unsent_from: int | None = None

    def writes(self, piece: str) -> Progress | None:
        """What arrives of its next piece."""
        position = len(self.text)
        self.text += piece
        if not self.is_linked or self.unsent_from is not None:
            return None
        return self.sent(piece, position)

    def sent(self, piece: str, position: int) -> Progress:
        said = position if self.knows_positions else None
        return Progress(PI, self.attempt, piece, len(piece), said)


@dataclass
class World:
    """Everything around one request, and what it saw."""

    life: Life
    now: float = 0.0
    in_window: bool = True
    decisions: int = 0
    claims: int = 0
    releases: int = 0
    closes: int = 0
    nodes: dict[int, Node] = field(default_factory=dict)
    shown: str = ""
    of_attempt: int = 0
    can_send: bool = True
    knows_positions: bool = True

    def happens(self, event: Event) -> None:
        self.now += 1.0
        self.life, effects = step(self.life, event, self.now)
        for effect in effects:
            self.do(effect)
        assert self.claims - self.releases == isinstance(self.life.state, AT_NODE)
        assert self.closes == isinstance(self.life.state, Ended)
        assert self.in_window == isinstance(self.life.state, Waiting)

    def do(self, effect: Effect) -> None:
        match effect:
            case Dequeue():
                assert self.in_window
                self.in_window = False
            case Requeue():
                assert not self.shown, "what has been shown cannot start again"
                self.in_window = True
            case TakeClaim():
                self.claims += 1
            case Release():
                self.releases += 1
            case SendWork(_, attempt):
                assert self.claims == self.releases + 1
                assert attempt not in self.nodes, "an attempt is sent once"
                if self.can_send:
                    self.nodes[attempt] = Node(attempt, knows_positions=self.knows_positions)
                else:
                    self.happens(NotSent())
            case SendResume(_, attempt, position):
                self.nodes[attempt].unsent_from = position
            case Push(_, text, _):
                assert not self.closes
                dispatch = dispatch_of(self.life.state)
                assert dispatch is not None
                self.shown += text
                self.of_attempt = dispatch.attempt
                assert self.nodes[dispatch.attempt].text.startswith(self.shown)
            case Finish():
                assert self.shown == (
                    self.nodes[self.of_attempt].text if self.of_attempt else ""
                ), "a finished answer is whole"
            case Close():
                self.closes += 1

    # what may happen at any time; each takes a number to choose with

    def window_closes(self, _: int) -> None:
        if self.in_window:
            self.in_window = False
            self.decisions += 1
            self.happens(WindowClosed())

    def batch_is_decided(self, choice: int) -> None:
        if self.decisions:
            self.decisions -= 1
            nobody = RequestFailed(NoDestinationError, "nobody")
            self.happens(decided(None, nobody) if choice % 20 == 0 else decided())

    def network_changes(self, _: int) -> None:
        self.can_send = not self.can_send

    def node_writes(self, choice: int) -> None:
        if node := self.any_node(choice):
            sent = node.writes("abc"[: choice % 3 + 1])
            if sent is not None:
                self.happens(sent)

    def node_repeats(self, choice: int) -> None:
        """After its link was lost a node may send again what it has sent."""
        node = self.any_node(choice)
        if node and node.is_linked and node.knows_positions and node.text:
            start = choice % len(node.text)
            self.happens(node.sent(node.text[start:], start))

    def node_resumes(self, choice: int) -> None:
        node = self.any_node(choice)
        if node and node.is_linked and node.unsent_from is not None:
            start, node.unsent_from = node.unsent_from, None
            if node.text[start:]:
                self.happens(node.sent(node.text[start:], start))

    def node_is_busy(self, choice: int) -> None:
        if (node := self.any_node(choice)) and node.is_linked:
            self.happens(Progress(PI, node.attempt, "", 0))

    def node_finishes(self, choice: int) -> None:
        """Also while something of its text is lost; it says how long the whole is."""
        if (node := self.any_node(choice)) and node.is_linked:
            position = len(node.text) if node.knows_positions else None
            self.happens(AnswerFinished(PI, node.attempt, WHOLE, position))

    def node_fails(self, choice: int) -> None:
        if (node := self.any_node(choice)) and node.is_linked:
            kind = list(FailureKind)[choice % len(FailureKind)]
            reason = FinishReason.CANCELLED if choice % 3 else FinishReason.FAILED
            self.happens(AnswerFinished(PI, node.attempt, Completion(reason, Usage(), kind)))

    def link_is_lost(self, choice: int) -> None:
        for node in self.nodes.values():
            node.is_linked = False
            node.unsent_from = None
        self.happens(LinkLost(PI, "power cut", self.now + choice % 30))

    def link_is_back(self, choice: int) -> None:
        for node in self.nodes.values():
            if not node.is_linked:
                node.is_linked = True
                self.happens(LinkBack(PI, node.attempt))

    def grace_ends(self, choice: int) -> None:
        self.now += choice % 30
        self.happens(GraceOver())

    def client_reads(self, _: int) -> None:
        match self.life.state:
            case Ending(Completed()):
                self.happens(Read())
            case Ending(RequestFailed() as failure):
                self.happens(GaveUp(failure))

    def client_gives_up(self, _: int) -> None:
        self.happens(GaveUp(SLOW))

    def client_leaves(self, _: int) -> None:
        self.happens(Left())

    def controller_stops(self, _: int) -> None:
        self.happens(Broke(SLOW))

    def any_node(self, choice: int) -> Node | None:
        """The last that got the request, or now and then one that had it earlier."""
        had_it = list(self.nodes.values())[::-1]
        return had_it[choice % len(had_it) if choice % 4 == 0 else 0] if had_it else None


OFTEN = {
    "window_closes": 4,
    "batch_is_decided": 4,
    "node_writes": 6,
    "node_repeats": 2,
    "node_resumes": 3,
    "node_is_busy": 1,
    "node_finishes": 1,
    "node_fails": 1,
    "link_is_lost": 2,
    "link_is_back": 3,
    "grace_ends": 1,
    "network_changes": 1,
}
SELDOM = ("client_reads", "client_gives_up", "client_leaves", "controller_stops")
DEEDS = [deed for deed, times in OFTEN.items() for _ in range(10 * times)] + list(SELDOM)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(0, 1000)), min_size=20, max_size=60),
    st.booleans(),
    st.integers(0, 3),
)
def test_no_order_of_events_loses_a_claim_a_word_or_the_end(
    deeds: list[tuple[str, int]], knows_positions: bool, earlier_attempts: int
) -> None:
    """`World.happens` and `World.do` check; the client leaves at last, as every client does."""
    world = World(admitted(0.0, 3, earlier_attempts), knows_positions=knows_positions)
    for deed, choice in deeds:
        getattr(world, deed)(choice)
    world.client_reads(0)
    world.client_leaves(0)
    assert world.closes == 1
    assert world.claims == world.releases
    ended: Any = world.life
    for deed, choice in deeds:
        if deed != "window_closes":
            getattr(world, deed)(choice)
    assert (world.life, world.closes) == (ended, 1), "what is over stays as it is"
