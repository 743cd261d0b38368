"""What serving takes: the real command over a profiled store, with one node behind it."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import numpy as np

from controller.client import Client, Connection, connected
from controller.lab.bench.prompts import made_up_prompts
from controller.lab.bench.store import DESTINATIONS, made_up_contents, sample_embeddings
from controller.lab.demo.errors import DemoError
from controller.lab.demo.processes import Processes
from controller.quality.embedding import EmbeddingBackend, EmbeddingUnavailableError
from controller.quality.files import QualityFolder
from controller.quality.store import QualityStore
from pointsman.v1 import admin_pb2, fleet_pb2, fleet_pb2_grpc, router_pb2, types_pb2

_NODE: Final = "bench"
_BATCH: Final = 30
_BATCHES: Final = 5
_START_SECONDS: Final = 240.0
_CALL_SECONDS: Final = 60.0
_INDEX_SECONDS: Final = 600.0
_STEP_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class ServingCost:
    """What was seen of the process.

    Attributes:
        start_seconds: from its start until it says that it serves.
        resident_megabytes: its memory when it has decided batches with estimates from the store,
            and built and kept the store's index.
        peak_megabytes: the most it ever took, the building included.
        imports_torch: whether torch's library is in its memory.
    """

    start_seconds: float
    resident_megabytes: float
    peak_megabytes: float
    imports_torch: bool


def serving_cost(
    backend: EmbeddingBackend, prompts: int, embedding_folder: Path | None = None
) -> ServingCost:
    """Start a controller over a store of made-up prompts, have it decide batches, and look at it.

    Args:
        backend: whose embeddings the store is said to hold.
        prompts: in the store; it comes without an index, as after profiling.
        embedding_folder: of the served model; None takes the default.

    Raises:
        EmbeddingUnavailableError: the controller did not serve with it.
    """
    with tempfile.TemporaryDirectory(prefix="pointsman-bench-") as name:
        folder = Path(name)
        _fill(folder / "quality", backend, prompts)
        try:
            return asyncio.run(_cost(folder, embedding_folder))
        except (DemoError, grpc.aio.AioRpcError, asyncio.TimeoutError) as error:
            raise EmbeddingUnavailableError(f"a controller did not serve: {error}") from error


def _fill(folder: Path, backend: EmbeddingBackend, prompts: int) -> None:
    rng = np.random.default_rng(0)
    embeddings = sample_embeddings(prompts, 0, rng, backend.dimension)[0]
    contents = made_up_contents(embeddings, DESTINATIONS, rng)
    with closing(
        QualityFolder(folder, backend.dimension, embedding_model=backend.model)
    ) as quality:
        quality.store = QualityStore.from_contents(contents)
        quality.compact()


async def _cost(folder: Path, embedding_folder: Path | None) -> ServingCost:
    processes = Processes(folder)
    environment = {}
    if embedding_folder is not None:
        environment["POINTSMAN_QUALITY_EMBEDDING_DIR"] = str(embedding_folder)
    started = time.monotonic()
    try:
        process = await processes.start(
            "controller",
            [
                sys.executable, "-m", "controller.cli", "serve", "--insecure",
                "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0",
                "--data-dir", str(folder), "--log-level", "warning",
            ],
            environment,
        )  # fmt: skip
        listening = await processes.first_line("controller", process, _START_SECONDS)
        start_seconds = time.monotonic() - started
        async with _node(listening["listen"]):
            await _decide_batches(listening["listen"], folder / "quality")
            status = _fields(Path(f"/proc/{process.pid}/status"))
            maps = Path(f"/proc/{process.pid}/maps").read_text()
    finally:
        await processes.stop()
    return ServingCost(
        start_seconds, _megabytes(status["VmRSS"]), _megabytes(status["VmHWM"]), "libtorch" in maps
    )


async def _decide_batches(address: str, quality: Path) -> None:
    rng = np.random.default_rng(1)
    async with connected(Connection(address, True, None)) as client:
        await _until_routable(client)
        for number in range(_BATCHES):
            if number == _BATCHES - 1:
                await _wait_for_index(quality)
            await client.router.Route(
                router_pb2.RouteRequest(
                    requests=[
                        types_pb2.InferenceRequest(
                            request_id=f"{number}-{place}",
                            prompt=prompt,
                            sampling=types_pb2.SamplingParameters(max_tokens=256),
                        )
                        for place, prompt in enumerate(made_up_prompts(_BATCH, rng))
                    ]
                ),
                timeout=_CALL_SECONDS,
            )


async def _until_routable(client: Client) -> None:
    """Until the controller has the node's first health sample."""
    deadline = time.monotonic() + _CALL_SECONDS
    while time.monotonic() < deadline:
        listed = await client.admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=_CALL_SECONDS)
        if any(node.state == "ready" and node.HasField("health") for node in listed.nodes):
            return
        await asyncio.sleep(_STEP_SECONDS)
    raise DemoError("the controller does not take its node for ready")


async def _wait_for_index(quality: Path) -> None:
    """Until a generation with an index is in force, which is the last thing that it writes."""
    deadline = time.monotonic() + _INDEX_SECONDS
    while time.monotonic() < deadline:
        generation = quality / (quality / "CURRENT").read_text().strip()
        if (generation / "graph.faiss").exists():
            return
        await asyncio.sleep(_STEP_SECONDS)
    raise asyncio.TimeoutError(f"it built no index within {_INDEX_SECONDS:g} s")


@asynccontextmanager
async def _node(address: str) -> AsyncIterator[None]:
    """A node with the destinations' models behind it, for as long as the context lasts."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        call = stub.Connect(_reports())
        welcome = await asyncio.wait_for(call.read(), _CALL_SECONDS)
        if welcome is grpc.aio.EOF:
            raise DemoError("the controller refused the node")
        try:
            yield
        finally:
            call.cancel()


async def _reports() -> AsyncIterator[fleet_pb2.ConnectRequest]:
    models = [
        fleet_pb2.ModelState(
            name=f"model-{number}",
            family="bench",
            parameters_billions=1.0 + number,
            quantisation="Q4_K_M",
            phase=fleet_pb2.MODEL_PHASE_READY,
            context_tokens=4096,
            slots=4,
            calibration=fleet_pb2.Calibration(
                prefill_tokens_per_second=200.0,
                decode_tokens_per_second=20.0,
                saturated_decode_tokens_per_second=60.0,
                utilisation_ratio=0.9,
            ),
            has_chat_template=True,
        )
        for number in range(DESTINATIONS)
    ]
    yield fleet_pb2.ConnectRequest(
        hello=fleet_pb2.Hello(
            node_id=_NODE,
            instance_id="bench",
            min_protocol_version=1,
            max_protocol_version=1,
            attributes=fleet_pb2.StaticAttributes(
                kind=types_pb2.NODE_KIND_EDGE, cpu_cores=os.cpu_count() or 1
            ),
            models=models,
        )
    )
    while True:
        yield fleet_pb2.ConnectRequest(health=fleet_pb2.HealthSample(uptime_seconds=1.0))
        await asyncio.sleep(1.0)


def _fields(status: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in status.read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}


def _megabytes(kibibytes: str) -> float:
    return int(kibibytes.split()[0]) * 1024 / 1e6
