"""A controller and agents in one event loop, talking real gRPC, with fake engines."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from controller.app import Listening, serve
from controller.client import Client, Connection, connected
from controller.config import (
    BatchingSettings,
    FleetSettings,
    QualitySettings,
    ServerSettings,
    Settings,
)
from edge_agent import app as agent_app
from edge_agent.config import ControllerSettings, LinkSettings, ModelSettings
from edge_agent.config import Settings as AgentSettings
from edge_agent.engine.base import EngineSettings, InferenceEngine
from edge_agent.engine.fake import FakeEngine
from edge_agent.engine.spec import PreparedModel
from edge_agent.serving.calibrations import Speeds
from edge_agent.status import StatusObject, ask_status
from pointsman.v1 import admin_pb2, router_pb2, types_pb2
from tests.fakes.engines import engines_with
from tests.fakes.waiting import PATIENCE_SECONDS

FAST = BatchingSettings(window_seconds=0.2, quiet_seconds=0.02)
FLEET = FleetSettings(health_interval_seconds=0.1, lease_seconds=10.0, probe_interval_seconds=0.2)


async def prepare_fake(name: str, report: Callable[[str], None]) -> PreparedModel:
    """A model file nobody reads."""
    return PreparedModel(Path(f"/nowhere/{name}.gguf"), name, "fake", 0.1, "Q4_0", 2048, None)


async def calibrate_fake(engine: InferenceEngine, slots: int) -> Speeds:
    """Speeds nobody measured."""
    return Speeds(2000.0, 200.0, 200.0 * slots)


@dataclass(slots=True)
class RunningAgent:
    """One agent; its engines are made when it loads its models."""

    settings: AgentSettings
    engines: list[FakeEngine] = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _task: "asyncio.Task[None] | None" = None

    def start(self, make_engine: Callable[[EngineSettings], FakeEngine]) -> None:
        self._stop = asyncio.Event()

        def make(settings: EngineSettings) -> FakeEngine:
            engine = make_engine(settings)
            self.engines.append(engine)
            return engine

        self._task = asyncio.create_task(
            agent_app.run(
                self.settings,
                self._stop,
                fetch=prepare_fake,
                engines=engines_with(make),
                calibrate=calibrate_fake,
                find_sensors=lambda settings: [],  # what this machine has must not matter
            )
        )

    async def stop(self) -> None:
        self._stop.set()
        if self._task is not None:
            await asyncio.wait_for(self._task, PATIENCE_SECONDS)

    async def kill(self) -> None:
        """End it without a word, as kill -9 would."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=60)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, by itself or not."""
        return self._task is None or self._task.done()

    async def status(self) -> StatusObject:
        return await ask_status(self.settings.socket_path)


@dataclass(slots=True)
class RunningFleet:
    """A controller, its client and the agents that were started."""

    listening: Listening
    client: Client
    folder: Path
    stop_controller: asyncio.Event
    _agents: list[RunningAgent] = field(default_factory=list)

    async def add_agent(
        self,
        node_id: str,
        models: tuple[ModelSettings, ...] = (ModelSettings("fake-a", slots=2, threads=1),),
        make_engine: Callable[[EngineSettings], FakeEngine] = FakeEngine,
        kind: str = "edge",
        wait: bool = True,
        drain_seconds: float = 2.0,
        link: LinkSettings = LinkSettings(),  # noqa: B008 - frozen
    ) -> RunningAgent:
        agent = RunningAgent(
            AgentSettings(
                node_id=node_id,
                kind=kind,
                data_dir=self.folder / node_id,
                drain_seconds=drain_seconds,
                controller=ControllerSettings(self.listening.grpc_address, insecure=True),
                models=models,
                link=link,
            )
        )
        agent.start(make_engine)
        self.adopt(agent)
        if wait:
            await self.wait_for_state(node_id, "ready")
        return agent

    def adopt(self, agent: RunningAgent) -> None:
        """End this agent, too, when the fleet ends."""
        self._agents.append(agent)

    def leave_running(self, agent: RunningAgent) -> None:
        """Do not end this agent when the fleet ends."""
        self._agents.remove(agent)

    async def nodes(self) -> dict[str, admin_pb2.NodeStatus]:
        response = await self.client.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=60)
        return {node.node_id: node for node in response.nodes}

    async def wait_for_state(
        self, node_id: str, state: str, seconds: float = PATIENCE_SECONDS
    ) -> None:
        with anyio.fail_after(seconds):
            while True:
                node = (await self.nodes()).get(node_id)
                # A ready node is used from its first health sample on.
                if node and node.state == state and (state != "ready" or node.HasField("health")):
                    return
                await asyncio.sleep(0.02)

    async def infer(
        self, prompt: str = "Say something.", **sampling: object
    ) -> tuple[str, router_pb2.Account]:
        """Answer one prompt; the text and the account."""
        return await self.infer_model("", prompt, **sampling)

    async def infer_model(
        self, model: str, prompt: str = "Say something.", **sampling: object
    ) -> tuple[str, router_pb2.Account]:
        """Answer one prompt with this model; the text and the account."""
        text = ""
        request = infer_request(prompt, model, **sampling)
        async for event in self.client.router.Infer(request, timeout=60):
            if event.WhichOneof("event") == "text":
                text += event.text.text
            elif event.WhichOneof("event") == "account":
                return text, event.account
        raise AssertionError("the stream ended without an account")


def infer_request(prompt: str, model: str = "", **sampling: object) -> router_pb2.InferRequest:
    return router_pb2.InferRequest(
        request=types_pb2.InferenceRequest(
            prompt=prompt,
            model=model,
            sampling=types_pb2.SamplingParameters(**sampling),  # type: ignore[arg-type]
        )
    )


@asynccontextmanager
async def running_fleet(
    folder: Path,
    batching: BatchingSettings = FAST,
    fleet: FleetSettings = FLEET,
    listen: str = "127.0.0.1:0",
    **sections: object,
) -> AsyncIterator[RunningFleet]:
    """A controller, on free ports by default; everything is stopped at the end."""
    settings = Settings(
        server=ServerSettings(
            listen=listen,
            http_listen="127.0.0.1:0",
            data_dir=folder / "controller",
            insecure=True,
            grace_seconds=1.0,
        ),
        batching=batching,
        fleet=fleet,
        # What the machine's cache holds must not change what tests see.
        **{"quality": QualitySettings(is_enabled=False), **sections},  # type: ignore[arg-type]
    )
    stop = asyncio.Event()
    ready: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(settings, stop, ready.set_result))
    await asyncio.wait([task, ready], timeout=250, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    listening = ready.result()
    running: RunningFleet | None = None
    try:
        async with connected(Connection(listening.grpc_address, True, None)) as client:
            running = RunningFleet(listening, client, folder, stop)
            yield running
    finally:
        for agent in running._agents if running else ():
            await agent.kill()
        stop.set()
        await asyncio.wait_for(task, PATIENCE_SECONDS)
