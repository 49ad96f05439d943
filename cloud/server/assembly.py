"""From settings to the scheduler's and the engine's own terms."""

from collections.abc import Callable
from pathlib import Path

from cloud.engine.api import Engine, EngineDescription
from cloud.engine.simulated import SimulatedEngine, SimulatedExecutor
from cloud.scheduler.policy import Policy
from cloud.scheduler.types import ReplicaSpec
from headway.config import EngineSettings, Settings
from headway.cost_model import CostModel, fit

__all__ = ["engine_factory", "make_policy", "replica_spec"]


def make_policy(settings: Settings) -> Policy:
    """The scheduler that `settings` ask for."""
    raise NotImplementedError


def engine_factory(
    settings: EngineSettings, folder: Path, vocabulary_tokens: int
) -> Callable[[], Engine]:
    """Makes a fresh engine, not started, each time it is called."""

    def simulated() -> Engine:
        one = settings.simulated
        return SimulatedEngine(
            SimulatedExecutor(
                one.cost_model(),
                num_blocks=settings.num_blocks,
                block_tokens=settings.block_tokens,
                max_context_tokens=settings.max_context_tokens or None,
                vocabulary_tokens=vocabulary_tokens,
                noise=one.noise,
                seed=one.seed,
            )
        )

    return simulated


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
    )


def _cost_model(description: EngineDescription, settings: EngineSettings) -> CostModel:
    if description.kind == "simulated":
        return settings.simulated.cost_model()
    return fit(description.calibration).model
