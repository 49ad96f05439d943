"""What can be set of the scheduler. Every value has a default that works."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.outcome import RequestClass

__all__ = ["ClassConfig", "SchedulerConfig", "TenantConfig"]

_MS = 1_000_000
_S = 1_000_000_000


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ValueError(f"{name} must be more than 0, got {value}")


@dataclass(frozen=True, slots=True)
class ClassConfig:
    """One class of requests.

    Raises:
        ValueError: a value out of its range.
    """

    # Budget where a promised request brings no deadline. None: such a request
    # is refused as impossible.
    default_budget_ns: int | None = None
    # Longest step while a request of the class decodes. None: no limit of its own.
    tpot_target_ns: int | None = 100 * _MS
    # Bounds on what waits, all tenants together.
    max_queued_requests: int = 100_000
    max_queued_tokens: int = 1 << 30  # Prompt plus largest output.
    # Wait after which the class may draw from the starvation lane.
    patience_ns: int = 600 * _S

    def __post_init__(self) -> None:
        _require_positive(self, "max_queued_requests", "max_queued_tokens", "patience_ns")
        for name in ("default_budget_ns", "tpot_target_ns"):
            if getattr(self, name) is not None:
                _require_positive(self, name)


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """One tenant.

    Raises:
        ValueError: a value out of its range.
    """

    weight: float = 1.0
    # Lasting rate of weighted tokens; 0 is unlimited.
    tokens_per_s: float = 0.0
    # Weighted tokens at once above that rate.
    burst_tokens: int = 0
    # Output to which a request is cut before it is refused; 0 is never.
    degraded_max_tokens: int = 0

    def __post_init__(self) -> None:
        _require_positive(self, "weight")
        for name in ("tokens_per_s", "burst_tokens", "degraded_max_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.tokens_per_s > 0 and self.burst_tokens == 0:
            raise ValueError("tokens_per_s needs burst_tokens of at least 1, or nothing passes")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler's settings.

    Raises:
        ValueError: a value out of its range.
    """

    interactive: ClassConfig = ClassConfig()
    standard: ClassConfig = ClassConfig(default_budget_ns=2 * _S)
    batch: ClassConfig = ClassConfig(tpot_target_ns=None)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    # Of a tenant that is not listed.
    default_tenant: TenantConfig = TenantConfig()

    # Most requests in a replica's batch.
    max_running: int = 256
    # Longest step, and so the longest that an arriving interactive request
    # waits for a step of lower work.
    max_step_ns: int = 100 * _MS
    # Smallest piece of a prefill for which a batch is joined.
    min_chunk_tokens: int = 16
    # Share of the prefill budget that short unpromised prefills leave to the
    # long one, so that it ends.
    long_prefill_share: float = 0.5

    # Weights of tokens in a tenant's share (VTC: Sheng et al., OSDI 2024).
    prompt_weight: float = 1.0
    output_weight: float = 2.0
    # How far a tenant's promised work may exceed its share, weighted tokens.
    fairness_bound_tokens: int = 8192
    # How long a refused tenant counts as one that wants service.
    demand_window_ns: int = 5 * _S

    # The starvation lane: a share of step time, kept over a window.
    lane_share: float = 0.05
    lane_window_ns: int = _S

    # Share of promises that may be broken. The margin on predictions is the
    # (1 - share) quantile of actual over predicted.
    target_miss_share: float = 0.001
    # After this long a measurement counts half in the margin.
    margin_half_life_ns: int = 10 * _S
    # Predicted time over which actual and predicted are compared.
    margin_span_ns: int = 200 * _MS

    # Contexts above it run in the long-context pool. None: no such pool.
    long_context_tokens: int | None = None
    use_prefix_cache: bool = True
    # Evictions for the growth of an equal, per second and replica.
    max_growth_evictions_per_s: float = 10.0
    # Evictions per second and replica beyond which batch work joins one at a time.
    max_evictions_per_s: float = 20.0
    # A request evicted so often gives way after the others of its class.
    max_evictions_each: int = 8

    def __post_init__(self) -> None:
        _require_positive(
            self,
            "max_running",
            "max_step_ns",
            "min_chunk_tokens",
            "long_prefill_share",
            "prompt_weight",
            "output_weight",
            "lane_window_ns",
            "margin_half_life_ns",
            "margin_span_ns",
            "max_growth_evictions_per_s",
            "max_evictions_per_s",
            "max_evictions_each",
        )
        for name in ("fairness_bound_tokens", "demand_window_ns", "lane_share"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("lane_share", "long_prefill_share", "target_miss_share"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be less than 1, got {getattr(self, name)}")
        _require_positive(self, "target_miss_share")
        if self.batch.default_budget_ns is not None:
            raise ValueError("batch work has no deadline, so it takes no default_budget_ns")

    def of_class(self, request_class: RequestClass) -> ClassConfig:
        """The settings of one class."""
        return (self.interactive, self.standard, self.batch)[request_class]

    def longest_step_ns(self, rank: int) -> int:
        """Longest step while requests of classes down to `rank` are in it."""
        targets = [self.interactive.tpot_target_ns, self.standard.tpot_target_ns][: rank + 1]
        return min([self.max_step_ns, *(one for one in targets if one is not None)])

    def of_tenant(self, tenant: str) -> TenantConfig:
        """The settings of one tenant, listed or not."""
        return self.tenants.get(tenant, self.default_tenant)
