"""The request manager with a decider and nodes that do what the test says."""

import asyncio

import pytest

from controller.config import BatchingSettings, LimitSettings
from controller.domain.completion import Completion, FailureKind, FinishReason, Usage
from controller.domain.request_record import Account, RequestState
from controller.errors import (
    ContextExceededError,
    DuplicateRequestError,
    GenerationFailedError,
    InvalidRequestError,
    NodeLostError,
    NoDestinationError,
    QueueFullError,
    RequestTimeoutError,
    RouterError,
    ShuttingDownError,
    SlowReaderError,
)
from controller.ids import BatchId, NodeId, RequestId
from controller.request_manager.stream import RoutedTo, Text
from tests.fakes.manager_bench import (
    FOR_LONG,
    PI,
    SMALL,
    VM,
    answered,
    bench,
    request,
    started,
)
from tests.fakes.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# -- a whole request -------------------------------------------------------------------------------


async def test_request_is_routed_streamed_and_accounted_for() -> None:
    async with bench() as made:
        reading = started(made, request())
        await made.until_sent(1)
        assert made.counts()["pi"] == (1, 0, 0)
        assert made.manager.records.get(RequestId("r1")).state is RequestState.DISPATCHED
        made.stream("Hi")
        assert made.manager.records.get(RequestId("r1")).state is RequestState.STREAMING
        made.end()
        *events, account = await reading
        assert events == [RoutedTo(PI, SMALL, BatchId("batch-1"), "first-allowed"), Text("Hi", 1)]
        assert isinstance(account, Account)
        assert (account.node_id, account.attempts) == (PI, 1)
        assert account.completion.usage.completion_tokens == 4
        assert account.total_seconds >= account.measured_finish_seconds >= 0.0
        record = made.manager.records.get(RequestId("r1"))
        assert (record.state, record.account) == (RequestState.COMPLETED, account)
        assert made.counts()["pi"] == (0, 1, 0)
        assert made.cancelled == []


async def test_failure_is_counted_once_and_told_in_its_kind() -> None:
    expected: dict[FailureKind, type[RouterError]] = {
        FailureKind.INVALID_REQUEST: InvalidRequestError,
        FailureKind.CONTEXT_EXCEEDED: ContextExceededError,
        FailureKind.TIME_LIMIT: RequestTimeoutError,
        FailureKind.INTERNAL: GenerationFailedError,
    }
    for failures, (kind, error) in enumerate(expected.items(), 1):
        async with bench() as made:
            reading = started(made, request())
            await made.until_sent(1)
            made.end(FinishReason.FAILED, failure=kind, message="why")
            with pytest.raises(error, match="why"):
                await reading
            assert made.counts()["pi"] == (0, 0, 1), failures
            assert made.manager.records.get(RequestId("r1")).state is RequestState.FAILED


async def test_client_that_leaves_cancels_at_the_node() -> None:
    async with bench() as made:
        reading = started(made, request())
        await made.until_sent(1)
        reading.cancel()
        await asyncio.wait([reading])
        assert made.cancelled == [(PI, "r1", 1)]
        assert made.counts()["pi"][0] == 0
        assert made.manager.records.get(RequestId("r1")).state is RequestState.CANCELLED
        made.stream("late")
        made.end()
        assert made.counts()["pi"][0] == 0


async def test_client_that_leaves_a_waiting_request_leaves_nothing_behind() -> None:
    async with bench(FOR_LONG) as made:
        reading = started(made, request())
        await until(lambda: made.manager.waiting_requests)
        reading.cancel()
        await asyncio.wait([reading])
        assert made.manager.waiting_requests == 0
        assert made.decider.batches == []
        assert made.cancelled == []


async def test_client_that_leaves_while_the_batch_is_decided_is_not_dispatched() -> None:
    async with bench() as made:
        made.decider.may_decide.clear()
        leaving, staying = started(made, request("leaves")), started(made, request("stays"))
        await until(lambda: made.decider.batches)
        leaving.cancel()
        await asyncio.wait([leaving])
        made.decider.may_decide.set()
        await made.until_sent(1)
        assert made.work == [(PI, "stays", 1)]
        made.end()
        await staying


# -- admission -------------------------------------------------------------------------------------


async def test_request_that_is_being_answered_is_not_answered_twice() -> None:
    async with bench(FOR_LONG) as made:
        first = started(made, request("same"))
        await until(lambda: made.manager.waiting_requests)
        with pytest.raises(DuplicateRequestError, match="'same'"):
            await answered(made, request("same"))
        assert made.manager.waiting_requests == 1
        first.cancel()
        await asyncio.wait([first])


async def test_finished_id_may_be_used_again() -> None:
    """The node would ignore an attempt that it has seen."""
    async with bench() as made:
        for number in (1, 2, 3):
            reading = started(made, request("same"))
            await made.until_sent(number)
            assert made.work[-1] == (PI, "same", number)
            made.stream("Hi")
            made.end()
            account = (await reading)[-1]
            assert isinstance(account, Account)
            assert account.attempts == 1


async def test_queue_never_grows_beyond_its_limit() -> None:
    limit = 5
    async with bench(BatchingSettings(window_seconds=30.0, max_waiting_requests=limit)) as made:
        tasks = [started(made, request(f"r{index}")) for index in range(3 * limit)]
        refused = 0
        await until(lambda: sum(task.done() for task in tasks) == 2 * limit)
        done, waiting = await asyncio.wait(tasks, timeout=0)
        for task in done:
            assert isinstance(task.exception(), QueueFullError)
            refused += 1
        assert (refused, made.manager.waiting_requests) == (2 * limit, limit)
        leaver = waiting.pop()
        leaver.cancel()
        await asyncio.wait([leaver])
        tasks.append(started(made, request("next")))
        await asyncio.sleep(0)
        assert made.manager.waiting_requests == limit
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert made.manager.waiting_requests == 0


async def test_draining_refuses_new_requests_and_lets_running_ones_end() -> None:
    async with bench() as made:
        reading = started(made, request("old"))
        await made.until_sent(1)
        draining = asyncio.create_task(made.manager.drain(PATIENCE_SECONDS))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDownError):
            await answered(made, request("new"))
        made.stream("Hi")
        made.end()
        assert isinstance((await reading)[-1], Account)
        await draining


async def test_draining_ends_in_time_and_tells_whoever_is_left() -> None:
    async with bench() as made:
        reading = started(made, request())
        await made.until_sent(1)
        await made.manager.drain(0.0)
        with pytest.raises(ShuttingDownError):
            await reading
        assert made.cancelled == [(PI, "r1", 1)]


# -- windows ---------------------------------------------------------------------------------------


async def test_full_window_closes_and_the_rest_opens_the_next() -> None:
    batching = BatchingSettings(window_seconds=30.0, max_requests=2, quiet_seconds=0.0)
    async with bench(batching) as made:
        tasks = [started(made, request(f"r{index}")) for index in range(5)]
        await made.until_sent(4)
        assert made.decider.batches == [["r0", "r1"], ["r2", "r3"]]
        assert made.manager.waiting_requests == 1
        tasks.append(started(made, request("r5")))
        await made.until_sent(6)
        assert made.decider.batches[-1] == ["r4", "r5"]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_deadline_is_kept_by_a_request_that_its_window_had_no_room_for() -> None:
    batching = BatchingSettings(window_seconds=30.0, max_requests=2, quiet_seconds=0.0)
    async with bench(batching) as made:
        tasks = [started(made, request("r0")), started(made, request("r1"))]
        tasks.append(started(made, request("pressed", deadline_seconds=0.2)))
        await made.until_sent(3)
        assert made.decider.batches == [["r0", "r1"], ["pressed"]]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_window_closes_soon_after_the_fleet_has_gone_idle() -> None:
    """Waiting longer could not help: 1. a busy fleet, 2. a request waits, 3. the fleet is idle."""
    batching = BatchingSettings(window_seconds=30.0, quiet_seconds=0.01)
    async with bench(batching) as made:
        first = started(made, request("first"))
        await made.until_sent(1)
        second = started(made, request("second"))
        await until(lambda: made.manager.waiting_requests)
        await asyncio.sleep(0)
        made.end()
        await first
        await made.until_sent(2)
        made.end()
        await second


async def test_failure_to_decide_fails_the_batch_and_nothing_else() -> None:
    async with bench() as made:
        made.decider.failure = RuntimeError("a bug")
        with pytest.raises(GenerationFailedError, match="Routing failed inside"):
            await answered(made, request("r1"))
        made.decider.failure = NoDestinationError("nobody")
        with pytest.raises(NoDestinationError, match="nobody"):
            await answered(made, request("r2"))
        made.decider.failure = None
        reading = started(made, request("r3"))
        await made.until_sent(1)
        made.end()
        await reading


async def test_failure_to_dispatch_fails_one_request_and_nothing_else() -> None:
    async with bench() as made:
        made.send_failure = ValueError("a number outside the field's range")
        with pytest.raises(GenerationFailedError):
            await answered(made, request("r1"))
        assert made.counts()["pi"][0] == 0
        made.send_failure = None
        reading = started(made, request("r2"))
        await made.until_sent(1)
        made.end()
        await reading


# -- nodes -----------------------------------------------------------------------------------------


async def test_lost_node_moves_a_request_that_streamed_nothing() -> None:
    async with bench() as made:
        reading = started(made, request())
        await made.until_sent(1)
        made.stream("", 0)
        made.lose(PI)
        await made.until_sent(2)
        assert made.work == [(PI, "r1", 1), (VM, "r1", 2)]
        made.manager.on_progress(PI, RequestId("r1"), 1, "late", 1)
        made.stream("Hi")
        made.end()
        *events, account = await reading
        assert [e.text for e in events if isinstance(e, Text)] == ["Hi"]
        assert isinstance(account, Account)
        assert (account.node_id, account.attempts) == (VM, 2)
        assert made.counts() == {"pi": (0, 0, 1), "vm": (0, 1, 0)}


@pytest.mark.parametrize("tokens", [1, 0])
async def test_lost_node_fails_a_request_that_has_shown_text(tokens: int) -> None:
    """A node may send text without counting a token for it."""
    async with bench() as made:
        reading = started(made, request())
        await made.until_sent(1)
        made.stream("Hi", tokens)
        made.lose(PI)
        with pytest.raises(NodeLostError, match="node pi was lost: power cut"):
            await reading
        assert made.work == [(PI, "r1", 1)]
        assert made.counts()["pi"] == (0, 0, 1)


async def test_request_moves_off_a_node_that_could_not_start_it() -> None:
    async with bench() as made:
        reading = started(made, request())
        await made.until_sent(1)
        made.end(FinishReason.FAILED, failure=FailureKind.QUEUE_FULL)
        await made.until_sent(2)
        assert made.work[-1] == (VM, "r1", 2)
        made.end()
        await reading
        assert made.counts() == {"pi": (0, 0, 1), "vm": (0, 1, 0)}


async def test_node_that_goes_between_decision_and_dispatch_is_planned_around() -> None:
    """Only the affected request is planned anew."""
    async with bench() as made:
        made.unreachable.add(PI)
        reading = started(made, request())
        await made.until_sent(1)
        assert made.work == [(VM, "r1", 2)]
        made.end()
        await reading
        assert made.counts()["pi"] == (0, 0, 1)


async def test_request_fails_when_its_attempts_are_used_up() -> None:
    async with bench(BatchingSettings(window_seconds=0.0, max_attempts=2)) as made:
        made.unreachable |= {PI, VM}
        with pytest.raises(NodeLostError, match="went away before it got the request"):
            await answered(made, request())
        assert [in_flight for in_flight, _, _ in made.counts().values()] == [0, 0]


@pytest.mark.parametrize(
    ("node_id", "attempt"), [(VM, 1), (PI, 2), (PI, 0)], ids=["other node", "later", "earlier"]
)
async def test_words_about_another_dispatch_are_ignored(node_id: NodeId, attempt: int) -> None:
    async with bench() as made:
        reading = started(made, request())
        await made.until_sent(1)
        made.manager.on_progress(node_id, RequestId("r1"), attempt, "wrong", 1)
        made.manager.on_completion(
            node_id, RequestId("r1"), attempt, Completion(FinishReason.STOP, Usage())
        )
        made.manager.on_progress(PI, RequestId("unknown"), 1, "wrong", 1)
        made.stream("right")
        made.end()
        assert [e.text for e in await reading if isinstance(e, Text)] == ["right"]


@pytest.mark.parametrize("text", ["", "Hi"])
async def test_finished_answer_is_its_clients_though_its_node_is_lost_before_it_reads(
    text: str,
) -> None:
    """An answer without a token, too, has been given: it is not asked for again elsewhere."""
    async with bench() as made:
        with made.manager.admitted(request()) as events:
            await made.until_sent(1)
            if text:
                made.stream(text)
            made.end()
            made.lose(PI)
            assert made.manager.waiting_requests == 0
            *_, account = [event async for event in events]
        assert isinstance(account, Account)
        assert (account.node_id, account.attempts) == (PI, 1)
        assert made.work == [(PI, "r1", 1)]
        assert made.counts() == {"pi": (0, 1, 0), "vm": (0, 0, 0)}


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.CANCELLED])
async def test_words_after_the_last_one_are_ignored(reason: FinishReason) -> None:
    async with bench() as made:
        with made.manager.admitted(request()) as events:
            await made.until_sent(1)
            made.end()
            made.stream("more")
            made.end(reason)
            *_, account = [event async for event in events]
        assert isinstance(account, Account)
        assert account.completion.reason is FinishReason.STOP
        assert made.manager.records.get(RequestId("r1")).state is RequestState.COMPLETED
        assert made.counts() == {"pi": (0, 1, 0), "vm": (0, 0, 0)}


async def test_failed_request_stays_failed_though_its_node_is_lost_before_its_client_reads() -> (
    None
):
    async with bench() as made:
        with made.manager.admitted(request()) as events:
            await made.until_sent(1)
            made.end(FinishReason.FAILED, failure=FailureKind.INVALID_REQUEST, message="why")
            made.lose(PI)
            assert made.manager.waiting_requests == 0
            assert isinstance(await anext(events), RoutedTo)
            with pytest.raises(InvalidRequestError, match="why"):
                await anext(events)
        assert made.work == [(PI, "r1", 1)]
        assert made.counts() == {"pi": (0, 0, 1), "vm": (0, 0, 0)}


async def test_failure_to_decide_is_not_told_to_a_later_request_of_the_same_id() -> None:
    async with bench() as made:
        made.decider.may_decide.clear()
        made.decider.failure = GenerationFailedError("no")
        first = started(made, request())
        await until(lambda: made.decider.batches)
        made.decider.failure = None
        first.cancel()
        await asyncio.wait([first])
        second = started(made, request())
        await until(lambda: made.manager.waiting_requests)
        made.decider.may_decide.set()
        await made.until_sent(1)
        made.end()
        assert isinstance((await second)[-1], Account)


async def test_id_that_is_used_again_before_its_first_client_has_gone_is_undisturbed() -> None:
    async with bench() as made:
        with made.manager.admitted(request()) as events:
            await made.until_sent(1)
            made.end()
            assert isinstance([event async for event in events][-1], Account)
            second = started(made, request())
            await made.until_sent(2)
        made.stream("Hi")
        made.end()
        assert Text("Hi", 1) in await second
        assert made.counts()["pi"] == (0, 2, 0)


async def test_slow_reader_is_cancelled_at_the_node_before_it_reads_on() -> None:
    """It may never ask again, and the node must not go on for it."""
    async with bench(limits=LimitSettings(max_buffered_bytes=10)) as made:
        with made.manager.admitted(request()) as events:
            await made.until_sent(1)
            made.stream("x" * 10)
            made.stream("x")
            assert made.cancelled == [(PI, "r1", 1)]
            assert made.counts()["pi"] == (0, 0, 1)
            assert isinstance(await anext(events), RoutedTo)
            assert await anext(events) == Text("x" * 10, 1)
            with pytest.raises(SlowReaderError):
                await anext(events)


async def test_engine_that_never_starts_is_given_up() -> None:
    async with bench(limits=LimitSettings(first_token_seconds=0.01)) as made:
        with pytest.raises(RequestTimeoutError, match="no progress"):
            await answered(made, request())
        assert made.cancelled == [(PI, "r1", 1)]
        assert made.counts()["pi"] == (0, 0, 1)
