"""A whole server from settings: builds its parts, starts and stops them in order."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from cloud.engine.api import Engine, EngineDescription, EngineLostError
from cloud.engine.model_config import ModelConfig, load_model_config
from cloud.engine.tokenizer import Tokenizer, load_tokenizer
from cloud.scheduler.policy import Policy
from cloud.scheduler.types import ReplicaSpec
from cloud.server.action import ActionCodec
from cloud.server.admin import AdminServer
from cloud.server.assembly import (
    engine_factory,
    make_authenticator,
    make_scheduler,
    make_tracing,
    replica_spec,
)
from cloud.server.calls import CallGate
from cloud.server.dispatcher import Dispatcher
from cloud.server.gauges import Gauges
from cloud.server.generate import Generate
from cloud.server.health import Health
from cloud.server.identity import require_guarded
from cloud.server.ledger import Ledger, StepTimes
from cloud.server.model_folder import model_folder
from cloud.server.next_action import ActionRequests
from cloud.server.operations_service import OPERATIONS_SERVICE, Observed, OperationsService
from cloud.server.replays import Replays
from cloud.server.replica import Replica
from cloud.server.robot_service import ROBOT_SERVICE, RobotService
from cloud.server.session import Sessions
from cloud.server.tls import server_credentials
from headway.clock import MonotonicClock, ns_from_s
from headway.config import ServerSettings, Settings
from headway.errors import HeadwayError
from headway.rpc.channel import server_options
from headway.telemetry.metrics import Metrics
from headway.telemetry.metrics_server import MetricsServer

__all__ = ["ObservedPolicy", "Server"]

# For statuses to reach their clients once everything has ended.
_LAST_WORDS_S = 1.0


class ObservedPolicy(Policy, Observed, Protocol):
    """A policy that can tell its state."""


class Server:
    """A server that is not started yet.

    Args:
        settings: everything that can be set.
        make_engine: a fresh engine for every start; by default what
            `settings.engine` asks for.
        policy: decides; by default the scheduler.

    Attributes:
        port: where it listens, once started.
        model: what is served.
        is_trained_to_act: whether its actions can mean anything.

    Raises:
        HeadwayError: settings that cannot be served, or no usable model.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        make_engine: Callable[[], Engine] | None = None,
        policy: ObservedPolicy | None = None,
    ) -> None:
        require_guarded(settings.server)
        self.settings = settings
        self.port = 0
        folder = model_folder(settings.engine.model)
        self.model: ModelConfig = load_model_config(folder)
        tokenizer = load_tokenizer(folder)
        self._clock = MonotonicClock()
        self._metrics = Metrics(tenant.name for tenant in settings.tenants)
        self._metrics_server: MetricsServer | None = None
        self._tracing = make_tracing(settings.telemetry)
        self._policy: ObservedPolicy = policy or make_scheduler(settings)
        self.dispatcher = Dispatcher(
            self._policy,
            self._replicas(
                make_engine or engine_factory(settings.engine, folder, self.model.vocabulary_tokens)
            ),
            Ledger(
                self._metrics if settings.server.metrics_port else None,
                self._clock.now_ns,
                self._tracing,
            ),
            self._clock,
            prefix_block_tokens=(
                settings.engine.block_tokens if settings.scheduler.prefix_cache else 0
            ),
            on_change=self._tell_health,
        )
        self._gate = CallGate(
            make_authenticator(settings, self._clock),
            self.dispatcher.ledger,
            settings.server.max_calls,
            settings.server.write_timeout_s,
        )
        self._robots = self._robot_service(tokenizer)
        self._operations: OperationsService | None = None
        self._health = Health((ROBOT_SERVICE, OPERATIONS_SERVICE))
        port = settings.server.admin_port
        self._admin = AdminServer(port, self._health) if port else None
        self._grpc: grpc.aio.Server | None = None
        self._gauges: asyncio.Task[None] | None = None

    @property
    def num_open_calls(self) -> int:
        """Calls and sessions that are open."""
        return self._gate.num_open

    @property
    def num_open_sessions(self) -> int:
        """Sessions that are open."""
        return self._robots.sessions.num_open

    @property
    def address(self) -> str:
        """Host and port, as a client is given them."""
        host = self.settings.server.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    async def start(self) -> None:
        """Starts everything; on an error nothing of it is left.

        Raises:
            HeadwayError: an address cannot be had, or an engine does not start.
        """
        try:
            await self._start()
        except EngineLostError as lost:
            await self.stop(grace_s=0)
            raise HeadwayError(f"the engine did not start: {lost.reason}") from lost
        except BaseException:
            await self.stop(grace_s=0)
            raise

    async def run(self) -> None:
        """Waits for a bug, and raises it; never returns by itself."""
        await self.dispatcher.run()

    async def drain(self, grace_s: float) -> None:
        """Refuses new work, and waits up to `grace_s` for what was promised."""
        self._health.stop()
        self.dispatcher.begin_stop()
        try:
            async with asyncio.timeout(grace_s):
                await self.dispatcher.wait_idle()
        except TimeoutError:
            pass  # Its clients are told by `stop`.

    async def stop(self, *, grace_s: float | None = None) -> None:
        """Drains, tells everyone who is left, and stops. May be called twice.

        Args:
            grace_s: how long to wait for what was promised; None: as set.
        """
        grace_s = self.settings.server.grace_s if grace_s is None else grace_s
        if self._grpc is not None:
            await self.drain(grace_s)
            self.dispatcher.end_all()
            self._robots.sessions.close()
            if self._operations is not None:
                self._operations.close()
            server, self._grpc = self._grpc, None
            await server.stop(_LAST_WORDS_S if grace_s else 0)
        await self.dispatcher.stop()
        if self._admin is not None:
            await self._admin.stop()
        if self._gauges is not None:
            self._gauges.cancel()
            self._gauges = None
        if self._metrics_server is not None:
            self._metrics_server.close()
            self._metrics_server = None
        if self._tracing is not None:
            # A collector that is slow to take the last spans holds up nobody else.
            await asyncio.to_thread(self._tracing.close)

    async def _start(self) -> None:
        listen = self.settings.server
        server = grpc.aio.server(
            options=server_options(
                max_message_bytes=listen.max_message_bytes, max_calls=listen.max_calls
            )
        )
        self._grpc = server
        # The address first: it costs nothing, and is what most often fails.
        self.port = _bind(server, listen)
        if listen.metrics_port:
            self._metrics_server = self._metrics.serve(listen.host, listen.metrics_port)
        if self._admin is not None:
            await self._admin.start()
        await self.dispatcher.start()
        self._health.add_to(server)
        self._operations = OperationsService(
            self._gate,
            self.dispatcher,
            self._policy,
            self.settings.tenants,
            self.model.name,
            self._clock,
            listen.write_timeout_s,
        )
        server.add_generic_rpc_handlers((self._robots.handler(), self._operations.handler()))
        if listen.reflection:
            names = (
                ROBOT_SERVICE,
                OPERATIONS_SERVICE,
                health.SERVICE_NAME,
                reflection.SERVICE_NAME,
            )
            reflection.enable_server_reflection(names, server)
        await _start_whole(server)
        self._tell_health()
        if self._metrics_server is not None:
            gauges = Gauges(self._metrics, self._policy, self.dispatcher.replicas, self._clock)
            self._gauges = asyncio.create_task(gauges.run())

    def _tell_health(self) -> None:
        self._health.tell(is_serving=self.dispatcher.takes_work)

    def _replicas(self, make_engine: Callable[[], Engine]) -> list[Replica]:
        engine = self.settings.engine
        metrics = self._metrics if self.settings.server.metrics_port else None

        def make_spec(replica_id: str, description: EngineDescription) -> ReplicaSpec:
            return replica_spec(replica_id, description, engine)

        replicas = []
        for number in range(engine.replicas):
            replica_id = f"replica-{number}"
            replicas.append(
                Replica(
                    replica_id,
                    make_engine,
                    make_spec,
                    self._clock,
                    StepTimes(replica_id, metrics),
                    step_timeout_ns=ns_from_s(engine.step_timeout_s),
                    stall=(engine.stall_factor, ns_from_s(engine.stall_after_s)),
                    backoff_ns=(
                        ns_from_s(engine.restart_backoff_s),
                        ns_from_s(engine.restart_backoff_max_s),
                    ),
                    on_change=self._tell_health,
                )
            )
        return replicas

    def _robot_service(self, tokenizer: Tokenizer) -> RobotService:
        settings = self.settings
        codec = ActionCodec(tokenizer, settings.actions, self.model.name)
        self.is_trained_to_act = not self.model.is_untrained and (
            codec.has_action_tokens or bool(settings.actions.adapter)
        )
        requests = ActionRequests(
            codec, self.dispatcher, Replays(self._clock.now_ns), adapter=settings.actions.adapter
        )
        sessions = Sessions(requests, settings.server, settings.actions, self._clock)
        generate = Generate(
            self.dispatcher,
            tokenizer,
            self.model.name,
            self.model.eos_tokens,
            settings.scheduler,
            self._clock,
            settings.server.write_timeout_s,
        )
        return RobotService(self._gate, requests, sessions, generate, self._clock)


async def _start_whole(server: grpc.aio.Server) -> None:
    """Starts `server`, also where the wish to stop it comes meanwhile."""
    # A start that is cancelled half-way leaves gRPC a server that it cannot
    # stop, and crashes the process at its end.
    starting = asyncio.ensure_future(server.start())
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await starting
        raise


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> int:
    """The port that was taken.

    Raises:
        HeadwayError: it cannot be had, or the files for TLS are not usable.
    """
    host, port = settings.host, settings.port
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    tls = server_credentials(settings.tls) if settings.tls.certificate else None
    try:
        bound: int = (
            server.add_secure_port(target, tls) if tls else server.add_insecure_port(target)
        )
    except RuntimeError:
        bound = 0
    if not bound:
        raise HeadwayError(
            f"cannot listen on {target}: is another server running there? "
            "Choose another port (--port), or 0 for a free one"
        )
    return bound
