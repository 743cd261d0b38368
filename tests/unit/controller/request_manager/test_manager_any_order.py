"""Whatever the order in which clients, nodes and the network speak, the accounts add up."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.config import LimitSettings
from controller.domain.completion import Completion, FailureKind, FinishReason, Usage
from controller.domain.request_record import Account, RequestState
from controller.errors import RouterError
from controller.ids import RequestId
from controller.request_manager.manager import InferEvent
from tests.fakes.manager_bench import PI, VM, Bench, bench, request
from tests.fakes.reports import hello, join

LAST_WORDS: Final = {
    "finishes": Completion(FinishReason.STOP, Usage(3, 4, 0.0, 0.1, 0.2)),
    "cannot start": Completion(FinishReason.FAILED, Usage(), FailureKind.QUEUE_FULL),
    "fails": Completion(FinishReason.FAILED, Usage(), FailureKind.INTERNAL, "why"),
    "cuts off": Completion(FinishReason.CANCELLED, Usage()),
}
TOKENS: Final = {"is busy": "", "streams": "x", "streams too much": "x" * 20}
CLIENTS: Final = ("asks", "asks again", "reads", "leaves")
NETWORK: Final = ("is lost", "comes back", "decides slowly", "decides")
DEEDS: Final = (*CLIENTS, *NETWORK, *TOKENS, *LAST_WORDS, "finishes", "is lost")


@dataclass
class Client:
    """One who has asked, reads when it is let, and leaves when it is cancelled."""

    name: str
    may_read: asyncio.Event
    task: "asyncio.Task[InferEvent]"

    @classmethod
    def asking(cls, made: Bench, name: str) -> "Client":
        may_read = asyncio.Event()

        async def ask() -> InferEvent:
            with made.manager.admitted(request(name)) as events:
                await may_read.wait()
                return [event async for event in events][-1]

        return cls(name, may_read, asyncio.create_task(ask()))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(DEEDS), max_size=40), st.integers(0, 2**32 - 1))
def test_counts_return_to_zero_and_each_dispatch_ends_once(deeds: list[str], seed: int) -> None:
    asyncio.run(in_this_order(deeds, random.Random(seed)))


async def in_this_order(deeds: Sequence[str], rng: random.Random) -> None:
    async with bench(limits=LimitSettings(max_buffered_bytes=10)) as made:
        clients = [Client.asking(made, name) for name in ("r0", "r1")]
        await some_turns()
        for deed in deeds:
            if deed == "asks":
                clients.append(Client.asking(made, f"r{len(clients)}"))
            elif deed in CLIENTS and clients:
                by_client(made, deed, rng.choice(clients), clients)
            elif deed in NETWORK:
                by_network(made, deed, rng)
            elif made.work:
                by_node(made, deed, rng)
            if rng.random() < 0.5:
                await some_turns()
            running = len(made.manager.records.running)
            assert made.profiler.inflight_requests() + made.manager.waiting_requests <= running
        made.decider.may_decide.set()
        for client in clients:
            client.may_read.set()
        await some_turns()
        for client in clients:
            client.task.cancel()
        await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
        await some_turns()
        check_accounts(made, clients)


async def some_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def by_client(made: Bench, deed: str, client: Client, clients: list[Client]) -> None:
    match deed:
        case "reads":
            client.may_read.set()
        case "leaves":
            client.task.cancel()
        case "asks again":
            clients.append(Client.asking(made, client.name))


def by_network(made: Bench, deed: str, rng: random.Random) -> None:
    node_id = rng.choice((PI, VM))
    match deed:
        case "is lost":
            made.unreachable.add(node_id)
            made.lose(node_id)
        case "comes back" if node_id in made.unreachable:
            made.unreachable.discard(node_id)
            join(made.profiler, asyncio.get_running_loop().time(), hello(node_id))
        case "decides slowly":
            made.decider.may_decide.clear()
        case "decides":
            made.decider.may_decide.set()


def by_node(made: Bench, deed: str, rng: random.Random) -> None:
    """A node speaks of any order it ever had, also of one that it is rid of."""
    node_id, name, attempt = rng.choice(made.work)
    request_id = RequestId(name)
    if deed in TOKENS:
        made.manager.on_progress(node_id, request_id, attempt, TOKENS[deed], len(TOKENS[deed]))
    else:
        made.manager.on_completion(node_id, request_id, attempt, LAST_WORDS[deed])


def check_accounts(made: Bench, clients: Sequence[Client]) -> None:
    assert made.manager.waiting_requests == 0
    assert not made.manager.records.running
    dispatches = Counter(node_id for node_id, _, _ in (*made.work, *made.refused))
    for node_id, record in made.profiler.nodes.items():
        ended = record.completed_requests + record.failed_requests + record.cancelled_requests
        assert (len(record.requests), ended) == (0, dispatches[node_id])
    for node in made.profiler.snapshot(asyncio.get_running_loop().time()).nodes:
        assert (node.inflight_requests, node.backlog_seconds) == (0, 0.0)
    last = {client.name: client for client in clients}
    admitted = [client for client in last.values() if made.manager.records.is_known(id_of(client))]
    for client in admitted:
        state = made.manager.records.get(id_of(client)).state
        assert state.is_final
        if client.task.cancelled():
            continue
        error = client.task.exception()
        if error is None:
            assert isinstance(client.task.result(), Account)
            assert state is RequestState.COMPLETED
        else:
            assert isinstance(error, RouterError), error


def id_of(client: Client) -> RequestId:
    return RequestId(client.name)
