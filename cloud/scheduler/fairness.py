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


class Account:
    """One tenant's standing and counts in one class, over all replicas."""

    __slots__ = (
        "admitted",
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
        "refused_ns",
        "rejected",
        "tenant",
        "weight",
        "yielded",
    )

    def __init__(self, rank: int, tenant: str, weight: float) -> None:
        self.rank = rank
        self.tenant = tenant
        self.weight = weight
        self.counter = 0.0  # Weighted tokens served, over the weight.
        self.promised_ns = 0.0  # Predicted time of its promised work that is not done.
        self.refused_ns: int | None = None  # When it was last refused for want of room.
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
            account = Account(rank, tenant, self._config.of_tenant(tenant).weight)
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
        """The tenant's weighted share of its class among those that want service, 0 to 1.

        Wants service: has live work, or was refused within the demand window.
        """
        since_ns = now_ns - self._config.demand_window_ns
        total = account.weight
        for other in self._accounts.values():
            if other.rank != account.rank or other is account:
                continue
            if other.num_live or (other.refused_ns is not None and other.refused_ns >= since_ns):
                total += other.weight
        return account.weight / total
