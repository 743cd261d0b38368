"""The composition root: builds the parts, starts and stops them in order."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio.abc import TaskStatus

from controller.api.grpc_server import GrpcServer
from controller.api.grpc_servicer import AdminServicer, RouterServicer
from controller.api.service import RouterService
from controller.config import Settings, SettingsError
from controller.domain.policy_choice import KeptChoice
from controller.fleet.links import NodeLinks
from controller.fleet.node_metrics import register_node_metrics
from controller.fleet.registry import Registry
from controller.fleet.servicer import FleetServicer
from controller.fleet.sessions import FleetSessions
from controller.fleet.state_keeper import StateKeeper
from controller.gateway.app import build_app
from controller.gateway.server import serve_http
from controller.memory import release_code, release_freed_memory
from controller.predictors.fitted_serving import FittedPredictor, open_fitted_predictor
from controller.profiler.state import ProfilerState
from controller.quality.embedding import EmbeddingUnavailableError
from controller.quality.files import QualityFilesError
from controller.quality.learner import Learner
from controller.quality.predictor import QualityPredictor, open_embedding, open_quality_predictor
from controller.request_manager.decider import Decider, serving_policy
from controller.request_manager.manager import RequestManager
from controller.request_manager.policy_files import policies_in
from controller.security.tls import ServerCertificate, server_certificate
from controller.storage.artifacts import ArtifactError
from controller.storage.base import (
    ControllerStore,
    Retention,
    StorageError,
    register_store_metrics,
)
from controller.storage.memory import MemoryStore
from controller.storage.sqlite import SqliteStore
from controller.telemetry.loop_lag import LoopLag
from controller.telemetry.metrics import Metrics

log = structlog.get_logger()

_STORE_SECONDS: Final = 5.0
"""How long what is not yet written may take when the controller stops."""

_LEARN_SECONDS: Final = 5.0
"""How long the last outcomes may take to be kept when the controller stops."""

_COMPILER_LIBRARY: Final = "libllvmlite"
"""What compiles the policies and loads them compiled (Numba's LLVM), and then has nothing to do."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the controller answers; `http_address` is None when HTTP is off."""

    grpc_address: str
    http_address: str | None
    ca_file: str | None


@dataclass(frozen=True, slots=True)
class Parts:
    """What a controller is made of, but for its doors."""

    sessions: FleetSessions
    keeper: StateKeeper
    manager: RequestManager
    loop_lag: LoopLag
    service: RouterService
    metrics: Metrics


async def serve(
    settings: Settings, stop: asyncio.Event, on_ready: Callable[[Listening], None]
) -> None:
    """Serve until `stop` is set, then drain.

    Raises:
        ListenError: an address cannot be listened on.
        SettingsError: the certificate cannot be used.
        UnknownPolicyError: the settings name no policy that serves.
    """
    certificate = server_certificate(settings.server)
    folder = settings.routing.ppo_artifacts
    find = policies_in(Path(folder).expanduser() if folder else None)
    serving_policy(settings.routing.policy, find)  # a wrong name is told before anything is opened
    async with _storing(settings) as store, _learning(settings) as (predictor, learner):
        decider = Decider(
            settings.routing,
            predictor,
            await _fitted(settings, predictor),
            find,
            await _kept_choice(store),
            store.save_choice,
        )
        await _serve(settings, certificate, decider, learner, store, stop, on_ready)


def compose(
    settings: Settings, decider: Decider, learner: Learner, store: ControllerStore
) -> Parts:
    """The parts of a controller, each with its metrics registered; nothing runs yet."""
    profiler = ProfilerState(stale_seconds=settings.fleet.lease_seconds)
    registry = Registry(settings.fleet.lease_seconds)
    links = NodeLinks(registry)
    keeper = StateKeeper(store, profiler, links)
    manager = RequestManager(
        settings.batching,
        settings.limits,
        profiler,
        decider,
        links.send_work,
        links.send_cancel,
        learner.finished,
        keeper.finished,
    )
    sessions = FleetSessions(
        settings.fleet, profiler, registry, links, manager, keeper.settled, settings.orders
    )
    loop_lag = LoopLag()
    metrics = Metrics()
    manager.register_metrics(metrics)
    decider.register_metrics(metrics)
    learner.register_metrics(metrics)
    loop_lag.register_metrics(metrics)
    register_node_metrics(metrics, profiler)
    register_store_metrics(metrics, store)
    service = RouterService(settings.limits, profiler, decider, manager, sessions, learner, store)
    return Parts(sessions, keeper, manager, loop_lag, service, metrics)


async def _serve(
    settings: Settings,
    certificate: ServerCertificate | None,
    decider: Decider,
    learner: Learner,
    store: ControllerStore,
    stop: asyncio.Event,
    on_ready: Callable[[Listening], None],
) -> None:
    parts = compose(settings, decider, learner, store)
    sessions, keeper, manager = parts.sessions, parts.keeper, parts.manager
    try:
        await keeper.restore()
    except StorageError as error:
        raise SettingsError(str(error)) from error
    server = GrpcServer(
        RouterServicer(parts.service),
        AdminServicer(parts.service, settings.batching),
        FleetServicer(sessions),
    )
    host, _, _ = settings.server.listen.rpartition(":")
    # A port in use is told before the policies are compiled, which takes a while the first time.
    port = server.bind(settings.server.listen, certificate)
    http_stop = asyncio.Event()
    http_address: str | None = None
    started = time.monotonic()
    try:
        if not await _finished_before(stop, decider.warm_up):
            return
        release_code(_COMPILER_LIBRARY)  # tens of megabytes, and the policies are ready
        release_freed_memory()
        await server.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(manager.run, name="request-manager")
            tasks.start_soon(sessions.watch_leases, name="lease-watch")
            tasks.start_soon(sessions.probe_paths, name="path-probes")
            tasks.start_soon(learner.run, name="learner")
            tasks.start_soon(keeper.run, name="state-keeper")
            tasks.start_soon(parts.loop_lag.run, name="loop-lag")
            if settings.server.http_listen:
                http_host, _, http_port = settings.server.http_listen.rpartition(":")
                http_address = await tasks.start(
                    _http, parts, settings, http_host, int(http_port), certificate, http_stop
                )
            on_ready(
                Listening(
                    f"{host}:{port}",
                    http_address,
                    str(certificate.ca_file) if certificate and certificate.ca_file else None,
                )
            )
            log.info("controller.started", listen=f"{host}:{port}", http=http_address)
            await stop.wait()
            log.info("controller.stopping", uptime_seconds=round(time.monotonic() - started, 1))
            await server.refuse()
            await manager.drain(settings.server.grace_seconds)
            http_stop.set()
            sessions.close()
            await server.stop(1.0)
            tasks.cancel_scope.cancel()
    finally:
        keeper.keep_all()
        await server.stop(0)


async def _finished_before(stop: asyncio.Event, work: Callable[[], Awaitable[None]]) -> bool:
    """Whether the work was done before somebody asked the controller to stop."""
    is_done = False

    async def cancel(scope: anyio.CancelScope) -> None:
        await stop.wait()
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel, tasks.cancel_scope)
        await work()
        is_done = True
        tasks.cancel_scope.cancel()
    return is_done


@asynccontextmanager
async def _storing(settings: Settings) -> AsyncIterator[ControllerStore]:
    """What keeps the controller's state; closed on every path."""
    storage = settings.storage
    retention = Retention(
        storage.keep_days,
        storage.max_requests,
        storage.max_megabytes << 20,
        storage.keep_prompts,
    )
    loop = asyncio.get_running_loop()
    store: ControllerStore
    if storage.is_enabled:
        try:
            store = await loop.run_in_executor(
                None, SqliteStore, settings.server.data_dir, retention
            )
        except StorageError as error:
            raise SettingsError(str(error)) from error
    else:
        store = MemoryStore(retention)
    try:
        yield store
    finally:
        with anyio.CancelScope(shield=True):  # it has a deadline of its own
            await loop.run_in_executor(None, store.close, _STORE_SECONDS)


async def _kept_choice(store: ControllerStore) -> KeptChoice | None:
    """The policy that an operator chose before the last restart.

    Raises:
        SettingsError: it cannot be read.
    """
    try:
        return await asyncio.get_running_loop().run_in_executor(None, store.load_choice)
    except StorageError as error:
        raise SettingsError(str(error)) from error


@asynccontextmanager
async def _learning(settings: Settings) -> AsyncIterator[tuple[QualityPredictor | None, Learner]]:
    """The quality predictor and what teaches it; closed on every path."""
    loop = asyncio.get_running_loop()
    predictor = await loop.run_in_executor(None, _predictor, settings)
    learner = Learner(predictor)
    try:
        yield predictor, learner
    finally:
        if predictor is not None:
            with anyio.move_on_after(_LEARN_SECONDS, shield=True):
                await learner.drain()
            predictor.close()


def _predictor(settings: Settings) -> QualityPredictor | None:
    """The quality predictor; None, with a word in the log, when there is no embedding model."""
    try:
        predictor = open_quality_predictor(settings.quality, settings.server.data_dir)
    except EmbeddingUnavailableError as error:
        is_wanted = settings.quality.is_enabled
        log.info(
            "quality.embedding_missing" if is_wanted else "quality.disabled", reason=str(error)
        )
        return None
    except QualityFilesError as error:
        raise SettingsError(str(error)) from error
    log.info("quality.opened", profiled_prompts=predictor.profiled_prompts)
    return predictor


async def _fitted(settings: Settings, predictor: QualityPredictor | None) -> FittedPredictor | None:
    """The fitted predictors; None, with a word in the log, without them or an embedding model.

    Raises:
        SettingsError: the folder of the settings does not load.
    """
    if not settings.predictors.folder:
        return None
    folder = Path(settings.predictors.folder).expanduser()
    loop = asyncio.get_running_loop()

    def opened() -> FittedPredictor:
        # Both embed the same prompts, so they share what is remembered of them.
        embed = predictor.embed if predictor else open_embedding(settings.quality).embed
        return open_fitted_predictor(folder, embed)

    try:
        fitted = await loop.run_in_executor(None, opened)
    except EmbeddingUnavailableError as error:
        log.warning("predictors.unused", folder=str(folder), reason=str(error))
        return None
    except ArtifactError as error:
        raise SettingsError(f"predictors.folder: {error}") from error
    log.info("predictors.opened", predictors=fitted.name)
    return fitted


async def _http(
    parts: Parts,
    settings: Settings,
    host: str,
    port: int,
    certificate: ServerCertificate | None,
    stop: asyncio.Event,
    *,
    task_status: TaskStatus[str],
) -> None:
    scheme = "http" if certificate is None else "https"
    await serve_http(
        build_app(parts.service, parts.metrics, settings.gateway),
        host.strip("[]"),  # of an IPv6 address
        port,
        stop,
        certfile=certificate.chain_file if certificate else None,
        keyfile=certificate.key_file if certificate else None,
        # After the drain has ended every stream with a word.
        grace_seconds=settings.server.grace_seconds + 2.0,
        started=lambda bound: task_status.started(f"{scheme}://{host}:{bound}"),
    )
