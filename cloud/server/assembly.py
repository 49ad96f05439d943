"""From settings to the scheduler's and the engine's own terms."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cloud.engine.api import Engine, EngineDescription
from cloud.engine.process import EngineProcess
from cloud.engine.simulated import SimulatedEngine, SimulatedExecutor
from cloud.engine.spec import EngineSpec
from cloud.scheduler.config import ClassConfig, SchedulerConfig, TenantConfig
from cloud.scheduler.scheduler import Scheduler
from cloud.scheduler.types import ReplicaSpec
from cloud.server.identity import CredentialAuthenticator
from cloud.server.keys import KeyFile, KeyRing
from headway.clock import Clock, ns_from_s
from headway.config import (
    EngineSettings,
    InteractiveSettings,
    Settings,
    StandardSettings,
    TelemetrySettings,
    TenantSettings,
)
from headway.cost_model import CostModel, fit
from headway.errors import HeadwayError

if TYPE_CHECKING:
    from headway.telemetry.tracing import Tracing

__all__ = [
    "engine_factory",
    "make_authenticator",
    "make_scheduler",
    "make_tracing",
    "replica_spec",
    "scheduler_config",
]


def make_scheduler(settings: Settings) -> Scheduler:
    """The scheduler that `settings` ask for."""
    return Scheduler(scheduler_config(settings))


def scheduler_config(settings: Settings) -> SchedulerConfig:
    """The scheduler's own settings: the same, in nanoseconds."""
    given = settings.scheduler
    return SchedulerConfig(
        interactive=_class_config(given.interactive),
        standard=_class_config(given.standard),
        batch=ClassConfig(
            tpot_target_ns=None,
            max_queued_requests=given.batch.max_queued_requests,
            max_queued_tokens=given.batch.max_queued_tokens,
            patience_ns=ns_from_s(given.batch.patience_s),
        ),
        tenants={tenant.name: _tenant_config(tenant) for tenant in settings.tenants},
        max_running=given.max_running,
        max_step_ns=ns_from_s(given.max_step_s),
        prompt_weight=given.prompt_weight,
        output_weight=given.output_weight,
        fairness_bound_tokens=given.fairness_bound_tokens,
        demand_window_ns=ns_from_s(given.demand_window_s),
        lane_share=given.starvation_share,
        lane_window_ns=ns_from_s(given.starvation_window_s),
        target_miss_share=given.target_miss_share,
        use_prefix_cache=given.prefix_cache,
    )


def make_authenticator(settings: Settings, clock: Clock) -> CredentialAuthenticator:
    """Who may call, by `settings`.

    Raises:
        ConfigError: the file of keys is not usable.
    """
    server = settings.server
    keys = KeyRing(KeyFile(Path(server.keys_file)), clock) if server.keys_file else None
    return CredentialAuthenticator(
        settings.tenants,
        keys=keys,
        trusts_certificates=bool(server.tls.client_authorities),
        development=server.development,
    )


def make_tracing(settings: TelemetrySettings) -> "Tracing | None":
    """What sends spans where `settings` say; None where they say nowhere.

    Raises:
        HeadwayError: the extra that it needs is not installed.
    """
    if not settings.otlp_endpoint:
        return None
    try:
        from headway.telemetry.tracing import Tracing, otlp_processor
    except ModuleNotFoundError as error:
        raise HeadwayError(
            f"telemetry.otlp_endpoint needs the package '{error.name}', which is not installed. "
            "Run: pip install 'headway[otel]', or leave the key out"
        ) from error
    return Tracing(otlp_processor(settings.otlp_endpoint))


def engine_factory(
    settings: EngineSettings, folder: Path, vocabulary_tokens: int
) -> Callable[[], Engine]:
    """Makes a fresh engine, not started, each time it is called.

    Args:
        settings: which one, and how large.
        folder: the checkpoint.
        vocabulary_tokens: of the checkpoint, for an engine that runs no model.
    """
    simulated = settings.simulated
    spec = EngineSpec(
        kind="torch",
        model_folder=str(folder),
        device=settings.device,
        dtype=settings.dtype,
        compile=settings.compile,
        threads=settings.num_threads,
        block_tokens=settings.block_tokens,
        num_blocks=settings.num_blocks,
        num_swap_blocks=settings.num_swap_blocks,
        max_context_tokens=settings.max_context_tokens or None,
        adapters=settings.adapter_folders,
    )

    def make_torch() -> Engine:
        return EngineProcess(spec, start_timeout_s=settings.start_timeout_s)

    def make_simulated() -> Engine:
        return SimulatedEngine(
            SimulatedExecutor(
                simulated.cost_model(),
                num_blocks=settings.num_blocks,
                block_tokens=settings.block_tokens,
                max_context_tokens=settings.max_context_tokens or None,
                vocabulary_tokens=vocabulary_tokens,
                noise=simulated.noise,
                seed=simulated.seed,
            )
        )

    return make_simulated if settings.kind == "simulated" else make_torch


def replica_spec(
    replica_id: str, description: EngineDescription, settings: EngineSettings
) -> ReplicaSpec:
    """A started engine as the scheduler sees it; its cost model from its calibration."""
    return ReplicaSpec(
        replica_id=replica_id,
        num_blocks=description.num_blocks,
        block_tokens=description.block_tokens,
        max_context_tokens=description.max_context_tokens,
        cost_model=_cost_model(description, settings),
        num_swap_blocks=description.num_swap_blocks,
        swap_block_ns=description.swap_block_ns,
    )


def _cost_model(description: EngineDescription, settings: EngineSettings) -> CostModel:
    if description.calibration:
        return fit(description.calibration).model
    # Only the simulated engine measures nothing: it follows what was set.
    return settings.simulated.cost_model()


def _class_config(given: InteractiveSettings | StandardSettings) -> ClassConfig:
    return ClassConfig(
        default_budget_ns=ns_from_s(given.slo_s),
        tpot_target_ns=ns_from_s(given.tpot_s),
        max_queued_requests=given.max_queued_requests,
        max_queued_tokens=given.max_queued_tokens,
    )


def _tenant_config(given: TenantSettings) -> TenantConfig:
    return TenantConfig(
        weight=given.weight,
        tokens_per_s=given.tokens_per_s,
        burst_tokens=given.burst_tokens,
        degraded_max_tokens=given.degraded_max_tokens,
    )
