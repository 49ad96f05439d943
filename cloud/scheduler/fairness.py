"""Fairness between tenants, counted in weighted tokens.

Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024): a tenant's counter grows with what it is served, divided by its
weight; the smallest counter is picked next; a tenant that comes back is lifted,
so that an idle one banks no credit.
"""

from collections.abc import Iterator

from cloud.scheduler.config import SchedulerConfig
from headway.outcome import Reason

__all__ = ["Account", "Accounts"]


class WindowedMost:
    """The largest value noted within a window, which ends one to two windows ago."""

    __slots__ = ("_before", "_now", "_started_ns", "_window_ns")

    def __init__(self, window_ns: int) -> None:
        self._window_ns = max(1, window_ns)
        self._started_ns = 0
        self._now = self._before = 0.0

    def note(self, value: float, now_ns: int) -> None:
        """Notes a value."""
        self._roll(now_ns)
        self._now = max(self._now, value)

    def most(self, now_ns: int) -> float:
        """The largest one; 0 where there was none."""
        self._roll(now_ns)
        return max(self._now, self._before)

    def _roll(self, now_ns: int) -> None:
        passed = (now_ns - self._started_ns) // self._window_ns
        if passed > 0:
            self._before = self._now if passed == 1 else 0.0
            self._now = 0.0
            self._started_ns += passed * self._window_ns


class Account:
    """One tenant's standing and counts in one class, over all replicas."""

    __slots__ = (
        "_service",
        "admitted",
        "asked",
        "cancelled",
        "completed",
        "counter",
        "expired",
        "failed",
        "missed",
        "num_running",
        "num_waiting",
        "output_tokens",
        "preemptions",
        "promised_ns",
        "prompt_tokens",
        "rank",
        "rejected",
        "tenant",
        "weight",
        "yielded",
    )

    def __init__(self, rank: int, tenant: str, weight: float, demand_window_ns: int) -> None:
        self.rank = rank
        self.tenant = tenant
        self.weight = weight
        self.counter = 0.0  # Weighted tokens served, over the weight.
        self.promised_ns = 0.0  # Predicted time of its promised work that is not done.
        # Its promised work and what it asked for besides, predicted time.
        self.asked = WindowedMost(demand_window_ns)
        self.num_waiting = 0
        self.num_running = 0
        self.admitted = 0
        self.completed = 0
        self.missed = 0
        self.yielded = 0  # Of the missed: standard promises that gave way to interactive.
        self.cancelled = 0
        self.expired = 0
        self.failed = 0
        self.rejected: dict[Reason, int] = {}
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.preemptions = 0
        # (decayed sum, seen so far, when)
        self._service: tuple[float, float, int] = (0.0, 0.0, 0)

    def recent_service(self, config: SchedulerConfig, now_ns: int) -> float:
        """Weighted tokens served, those of a demand window ago counting half."""
        served = (
            config.prompt_weight * self.prompt_tokens + config.output_weight * self.output_tokens
        )
        recent, seen, at_ns = self._service
        keep: float = 0.5 ** ((now_ns - at_ns) / max(1, config.demand_window_ns))
        recent = recent * keep + served - seen
        self._service = (recent, served, now_ns)
        return recent

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return self.num_waiting + self.num_running

    def charge(self, weighted_tokens: float) -> None:
        """Counts service."""
        self.counter += weighted_tokens / self.weight


class Accounts:
    """All tenants' accounts, and the rules that compare them."""

    __slots__ = ("_accounts", "_config", "_idle_counter")

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._accounts: dict[tuple[int, str], Account] = {}
        # For each class the counter of the last tenant that left it empty.
        self._idle_counter = [0.0, 0.0, 0.0]

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def of(self, rank: int, tenant: str) -> Account:
        """The account, made at first use."""
        account = self._accounts.get((rank, tenant))
        if account is None:
            weight = self._config.of_tenant(tenant).weight
            account = Account(rank, tenant, weight, self._config.demand_window_ns)
            self._accounts[rank, tenant] = account
        return account

    def activate(self, account: Account) -> None:
        """Lifts a tenant that becomes active: call before its first live request.

        Up to the smallest active counter or, where nobody was active, to that of
        the last one that was. Never down.
        """
        smallest = min(
            (
                other.counter
                for other in self._accounts.values()
                if other.rank == account.rank and other is not account and other.num_live
            ),
            default=self._idle_counter[account.rank],
        )
        account.counter = max(account.counter, smallest)

    def deactivate(self, account: Account) -> None:
        """Remembers the counter of a tenant whose last live request has ended."""
        if not any(
            other.num_live for other in self._accounts.values() if other.rank == account.rank
        ):
            self._idle_counter[account.rank] = account.counter

    def share_of(self, account: Account, now_ns: int) -> float:
        """The tenant's weighted share of its class among those that want service, 0 to 1."""
        total = account.weight + sum(other.weight for other in self._rivals(account, now_ns))
        return account.weight / total

    def is_behind(self, account: Account, now_ns: int) -> bool:
        """Whether the tenant was served less than its share of late.

        Of what it and those that want service besides were served, older service
        counting less.
        """
        config = self._config
        rivals = self._rivals(account, now_ns)
        own = account.recent_service(config, now_ns)
        total = own + sum(other.recent_service(config, now_ns) for other in rivals)
        weights = account.weight + sum(other.weight for other in rivals)
        return own * weights < total * account.weight

    def claims_ns(self, account: Account, room_ns: float, now_ns: int) -> float:
        """What the others that want service may claim of `room_ns` of promised work.

        What each one asked for at most at a time within the demand window, and
        no more than its share.
        """
        rivals = self._rivals(account, now_ns)
        total = account.weight + sum(other.weight for other in rivals)
        return sum(
            min(room_ns * other.weight / total, other.asked.most(now_ns)) for other in rivals
        )

    def _rivals(self, account: Account, now_ns: int) -> list[Account]:
        """The other tenants of the class that have live work or asked for service
        within the demand window, refused or not.
        """
        return [
            other
            for other in self._accounts.values()
            if other.rank == account.rank
            and other is not account
            and (other.num_live or other.asked.most(now_ns) > 0)
        ]
