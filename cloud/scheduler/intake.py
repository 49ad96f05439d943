"""Who gets in: what every request is asked before it is taken, in order.

Well formed, servable at all, within its tenant's bucket, room in the queues, within
its tenant's share, and for promised classes: a promise that can be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloud.scheduler.admission import Late, SchedulabilityTest
from cloud.scheduler.bucket import TokenBucket
from cloud.scheduler.config import SchedulerConfig
from cloud.scheduler.fairness import Accounts
from cloud.scheduler.replica import Replica
from cloud.scheduler.request_state import NEVER_NS, LiveRequest
from cloud.scheduler.types import Request
from headway.outcome import Reason, RequestClass

__all__ = ["Intake", "Refusal"]

_BATCH = int(RequestClass.BATCH)
# When to ask again where nothing says when it will be better.
_RETRY_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request does not get in."""

    reason: Reason
    message: str
    retry_after_ns: int | None = None
    predicted_ns: int | None = None


class Intake:
    """Decides about newcomers, and keeps the counts that the bounds are about."""

    __slots__ = (
        "_accounts",
        "_buckets",
        "_config",
        "_queued_requests",
        "_queued_tokens",
        "_replicas",
        "_test",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        accounts: Accounts,
        buckets: dict[str, TokenBucket],
        replicas: Mapping[str, Replica],
    ) -> None:
        self._config = config
        self._accounts = accounts
        self._buckets = buckets
        self._replicas = replicas
        self._test = SchedulabilityTest(config)
        self._queued_requests = [0, 0, 0]
        self._queued_tokens = [0, 0, 0]

    # --- a request's terms ---

    def to_live(self, request: Request, *, seq: int, serial: int, now_ns: int) -> LiveRequest:
        """The record of a request.

        Raises:
            ValueError: impossible by its own terms.
        """
        live = LiveRequest(
            request,
            seq=seq,
            serial=serial,
            now_ns=now_ns,
            deadline_ns=self._deadline_ns(request, now_ns),
            max_output=request.max_output_tokens,
            account=self._accounts.of(int(request.request_class), request.tenant),
        )
        live.output_charge = self._config.output_weight / live.account.weight
        return live

    def _deadline_ns(self, request: Request, now_ns: int) -> int:
        name = f"request '{request.request_id}'"
        if request.prompt_tokens < 1 or request.max_output_tokens < 1:
            raise ValueError(
                f"{name} needs at least one prompt token and one output token, got "
                f"{request.prompt_tokens} and {request.max_output_tokens}"
            )
        if not request.request_class.is_promised:
            if request.deadline_ns is not None:
                raise ValueError(f"{name} is batch work, which has no deadline; leave it out")
            return NEVER_NS
        if request.deadline_ns is not None:
            return request.deadline_ns
        budget_ns = self._config.of_class(request.request_class).default_budget_ns
        if budget_ns is None:
            raise ValueError(
                f"{name} is {request.request_class.label} and needs a deadline: without one "
                "nothing can be promised"
            )
        return now_ns + budget_ns

    def weighted_tokens(self, live: LiveRequest) -> float:
        """Most weighted tokens that a request may use."""
        return (
            self._config.prompt_weight * live.prompt_tokens
            + self._config.output_weight * live.max_output
        )

    # --- pools ---

    def is_long(self, live: LiveRequest) -> bool:
        """Whether it belongs to the long-context pool."""
        threshold = self._config.long_context_tokens
        return threshold is not None and live.prompt_tokens + live.max_output > threshold

    def assign_pools(self) -> None:
        """Tells each replica those of the other pool. A pool's work goes to the
        others where it has no replica that is open to the tenant and large enough.
        """
        threshold = self._config.long_context_tokens
        if threshold is None:
            return
        for replica in self._replicas.values():
            replica.threshold_tokens = threshold
            replica.peers = tuple(
                other
                for other in self._replicas.values()
                if other.spec.is_long_context is not replica.spec.is_long_context
            )

    def _eligible(self, live: LiveRequest) -> list[Replica]:
        is_long = self.is_long(live)
        return [
            replica
            for replica in self._replicas.values()
            if replica.takes(live.tenant, is_long)
            and replica.fits_alone(live.prompt_tokens, live.max_output)
        ]

    # --- admission ---

    def admit(self, live: LiveRequest, older: LiveRequest | None, now_ns: int) -> int | Refusal:
        """Lets a request in, with everything reserved that it needs; or says why not.

        Args:
            live: the newcomer.
            older: a live request that it would take the place of.
            now_ns: the time.

        Returns:
            The instant at which its promise is predicted to be kept; for batch
            work, that of the answer if it ran alone.
        """
        if not self._replicas:
            return Refusal(Reason.NO_ENGINE, "no engine is up", _RETRY_NS)
        eligible = self._eligible(live)
        if not eligible:
            return self._unplaceable(live)
        refusal = self._within_bounds(live, older, now_ns)
        if refusal is not None:
            return refusal
        if live.rank == _BATCH:
            live.bucket = self._limited_bucket(live.tenant, now_ns)
            return now_ns + round(min(_alone_ns(live, replica) for replica in eligible))
        return self._promise(live, older, eligible, now_ns)

    def _unplaceable(self, live: LiveRequest) -> Refusal:
        meant = [one for one in self._replicas.values() if one.is_meant_for(live.tenant)]
        if not meant:
            # Those that are up are reserved for others; one of its own may come back.
            return Refusal(Reason.NO_ENGINE, "no engine that may serve you is up", _RETRY_NS)
        if any(
            one.is_draining and one.fits_alone(live.prompt_tokens, live.max_output) for one in meant
        ):
            return Refusal(
                Reason.DRAINING, "every engine that could take it is drained; ask another server"
            )
        most = max(
            min(one.spec.max_context_tokens, one.spec.num_blocks * one.spec.block_tokens)
            for one in meant
        )
        return Refusal(
            Reason.TOO_LARGE,
            f"{live.prompt_tokens} prompt and {live.max_output} output tokens fit no engine: "
            f"at most {most} tokens in all",
        )

    def _within_bounds(
        self, live: LiveRequest, older: LiveRequest | None, now_ns: int
    ) -> Refusal | None:
        """Token bucket and queue bounds."""
        bucket = self._limited_bucket(live.tenant, now_ns)
        if bucket is not None and live.rank != _BATCH:
            wait_ns = bucket.wait_ns(self.weighted_tokens(live), now_ns)
            if wait_ns != 0:
                return Refusal(
                    Reason.QUOTA,
                    f"tenant '{live.tenant}' has {bucket.level(now_ns):.0f} weighted tokens left, "
                    f"{self.weighted_tokens(live):.0f} are needed",
                    wait_ns,
                )
        limits = self._config.of_class(RequestClass(live.rank))
        gone = int(older is not None and older.rank == live.rank and not older.blocks)
        requests = self._queued_requests[live.rank] - gone
        tokens = self._queued_tokens[live.rank] + live.prompt_tokens + live.max_output
        if requests >= limits.max_queued_requests or tokens > limits.max_queued_tokens:
            return Refusal(
                Reason.QUEUE_FULL,
                f"{self._queued_requests[live.rank]} {RequestClass(live.rank).label} requests "
                f"with {self._queued_tokens[live.rank]} tokens wait already",
                _RETRY_NS,
            )
        return None

    def _promise(
        self,
        live: LiveRequest,
        older: LiveRequest | None,
        eligible: list[Replica],
        now_ns: int,
    ) -> int | Refusal:
        live.promised_ns = _alone_ns(live, eligible[0]) - eligible[0].cost.t0_ns
        refusal = self._within_share(live, older, eligible, now_ns)
        if refusal is not None:
            return refusal
        placement = self._test.place(live, eligible, now_ns, older)
        degraded = self._config.of_tenant(live.tenant).degraded_max_tokens
        may_cut = 0 < degraded < live.max_output and not live.request.has_fixed_output
        if isinstance(placement, Late) and may_cut:
            live.max_output = degraded
            placement = self._test.place(live, eligible, now_ns, older)
        if isinstance(placement, Late):
            return Refusal(
                Reason.LATE, placement.message, placement.retry_after_ns, placement.predicted_ns
            )
        live.replica = placement.replica
        bucket = self._limited_bucket(live.tenant, now_ns)
        if bucket is not None:
            live.reserved_tokens = self.weighted_tokens(live)
            bucket.draw(live.reserved_tokens, now_ns)
        return placement.finish_ns

    def _within_share(
        self,
        live: LiveRequest,
        older: LiveRequest | None,
        eligible: list[Replica],
        now_ns: int,
    ) -> Refusal | None:
        """Caps a tenant's promised work while others want service too."""
        account = live.account
        held_ns = account.promised_ns - (older.promised_ns if older is not None else 0.0)
        account.asked.note(held_ns + live.promised_ns, now_ns)
        share = self._accounts.share_of(account, now_ns)
        if share >= 1 or held_ns <= 0 or self._accounts.is_behind(account, now_ns):
            return None
        room_ns = self._room_ns(live, eligible, now_ns)
        bound_ns = (
            self._config.fairness_bound_tokens * live.promised_ns / self.weighted_tokens(live)
        )
        # Beyond its share only what nobody else claims, and at most the bound.
        unclaimed_ns = room_ns - self._accounts.claims_ns(account, room_ns, now_ns)
        allowed_ns = max(share * room_ns, min(share * room_ns + bound_ns, unclaimed_ns))
        over_ns = held_ns + live.promised_ns - allowed_ns
        if over_ns <= 0:
            return None
        return Refusal(
            Reason.FAIR_SHARE,
            f"tenant '{live.tenant}' has its share of {share:.0%} while others want service",
            max(1, round(over_ns / (share * len(eligible)))),
        )

    def _room_ns(self, live: LiveRequest, eligible: list[Replica], now_ns: int) -> float:
        """Promised work like this request's that fits into the time that it has.

        A newcomer waits for a step; then every step costs t0, which nobody's
        tokens pay for: one of n steps leaves span - n·t0, and full steps leave
        that share of the target.
        """
        cost = eligible[0].cost
        target_ns = self._config.longest_step_ns(live.rank)
        span_ns = max(0, live.deadline_ns - now_ns - target_ns)
        steps = live.max_output if live.covers_last else 1
        room_ns = min(span_ns - steps * cost.t0_ns, span_ns * (1 - cost.t0_ns / target_ns))
        return max(0.0, room_ns) * len(eligible)

    def bind(self, live: LiveRequest, older: LiveRequest | None, now_ns: int) -> Replica | None:
        """Another replica that can keep a promise already given, if there is one."""
        eligible = self._eligible(live)
        if not eligible:
            return None
        placement = self._test.place(live, eligible, now_ns, older)
        if isinstance(placement, Late):
            return None
        live.replica = placement.replica
        return placement.replica

    # --- books ---

    @property
    def queued_tokens(self) -> tuple[int, int, int]:
        """Tokens (prompt and largest output) that wait, by class."""
        interactive, standard, batch = self._queued_tokens
        return interactive, standard, batch

    def queued(self, live: LiveRequest) -> None:
        """Counts a request that waits."""
        self._queued_requests[live.rank] += 1
        self._queued_tokens[live.rank] += live.prompt_tokens + live.max_output

    def dequeued(self, live: LiveRequest) -> None:
        """Counts one that waits no longer."""
        self._queued_requests[live.rank] -= 1
        self._queued_tokens[live.rank] -= live.prompt_tokens + live.max_output

    def settle(self, live: LiveRequest) -> None:
        """Gives back what a promised request reserved of its bucket and did not use."""
        if live.reserved_tokens:
            prompt = live.prompt_tokens if live.is_prompt_charged else 0
            used = (
                self._config.prompt_weight * prompt + self._config.output_weight * live.num_output
            )
            self._buckets[live.tenant].give_back(live.reserved_tokens - used)
            live.reserved_tokens = 0.0

    def _limited_bucket(self, tenant: str, now_ns: int) -> TokenBucket | None:
        """The tenant's bucket, made at first use; None where it has no limit."""
        bucket = self._buckets.get(tenant)
        if bucket is None:
            config = self._config.of_tenant(tenant)
            if config.tokens_per_s <= 0:
                return None
            bucket = TokenBucket(config.tokens_per_s, config.burst_tokens, now_ns)
            self._buckets[tenant] = bucket
        return bucket


def _alone_ns(live: LiveRequest, replica: Replica) -> float:
    """Predicted time of a request's own tokens, with one step's t0."""
    cost = replica.cost
    decodes = live.max_output - 1 if live.covers_last else 0
    context = live.prompt_tokens + decodes / 2
    return (
        cost.t0_ns
        + cost.chunk_ns(0, live.prompt_tokens)
        + decodes * (cost.decode_ns + cost.kv_ns * context)
    )
