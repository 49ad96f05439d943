"""Drives the policy with real time and real engines: one asyncio loop for all of it.

A service submits a request and gets a `Call`; tokens and the end come to it by
callbacks on the loop. For each replica one task goes plan -> execute -> commit,
and plans the next step as soon as the last result is in.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cloud.engine.api import EngineRequest
from cloud.scheduler.policy import Policy
from cloud.scheduler.prefix import prefix_hashes
from cloud.scheduler.types import (
    Admitted,
    Ended,
    Event,
    FinishReason,
    Rejected,
    TokenEmitted,
)
from cloud.server.call import Call
from cloud.server.ledger import Ledger
from cloud.server.refused import CallRefused
from cloud.server.replica import Replica
from headway.clock import Clock, s_from_ns
from headway.outcome import Outcome, Reason

__all__ = ["Dispatcher"]


class Dispatcher:
    """Takes requests in, runs the replicas, tells every request its end.

    All methods are for the loop that `start` ran on. Callbacks run inside the
    call that caused them and must neither raise nor wait.

    Args:
        policy: decides.
        replicas: run the engines.
        ledger: keeps count of what became of requests.
        clock: the one clock of policy and deadlines; must be the loop's own
            (monotonic), since timers are set by it.
        prefix_block_tokens: tokens in the engines' KV blocks, by which equal
            beginnings of prompts are found; 0: they are not looked for.
        on_change: called when it may be asked for more, or for less, than before.

    Attributes:
        is_draining: new work is refused.
        is_stopping: and that for good.
    """

    def __init__(
        self,
        policy: Policy,
        replicas: Sequence[Replica],
        ledger: Ledger,
        clock: Clock,
        *,
        prefix_block_tokens: int = 0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy = policy
        self.replicas = tuple(replicas)
        self.ledger = ledger
        self.is_draining = self.is_stopping = False
        self._on_change = on_change
        self._clock = clock
        self._prefix_block_tokens = prefix_block_tokens
        self._calls: dict[str, Call] = {}
        self._expiry: asyncio.TimerHandle | None = None
        self._expiry_ns = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_live(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._calls)

    @property
    def takes_work(self) -> bool:
        """Whether a request can be taken in at all."""
        return not self.is_draining and any(
            replica.is_up and not replica.is_draining for replica in self.replicas
        )

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus output that some replica's engine can take."""
        return max(
            (one.description.max_context_tokens for one in self.replicas if one.description),
            default=0,
        )

    async def start(self) -> None:
        """Starts every engine, and waits until all are ready.

        Raises:
            EngineLostError: one did not start; all are stopped again.
        """
        try:
            # One after the other: each calibrates, and would disturb the other.
            for replica in self.replicas:
                await replica.start(self)
        except BaseException:
            await self._stop_engines()
            raise
        for replica in self.replicas:
            self._tasks.append(asyncio.create_task(replica.run(self), name=replica.replica_id))

    async def run(self) -> None:
        """Waits for a bug, and raises what stopped a replica's task."""
        # Not `gather`: whoever gives up waiting must not take the replicas along.
        ended, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            task.result()

    def submit(self, call: Call) -> Admitted | Rejected:
        """Asks for admission; an admitted call is told its end.

        Raises:
            ValueError: the request is impossible by its own terms.
        """
        now_ns = self._clock.now_ns()
        request = call.request
        # Before the answer: admission may itself end what it supersedes.
        self._calls[request.request_id] = call
        try:
            answer = self.policy.submit(request, now_ns)
        except ValueError:
            del self._calls[request.request_id]
            raise
        if isinstance(answer, Rejected):
            del self._calls[request.request_id]
            if answer.retry_after_ns is None and answer.reason is Reason.NO_ENGINE:
                answer = self._with_restart_hint(answer)
            self.ledger.rejected(call, answer)
            return answer
        self._idle.clear()
        self.ledger.admitted(call, answer)
        if answer.events:
            self.tell(answer.events)
        self.wake_idle()
        self._watch_expiry()
        return answer

    def cancel(self, call: Call) -> None:
        """Ends a call for its client. One that has ended is left alone."""
        if call.ended is None:
            self.tell(self.policy.cancel(call.request.request_id, self._clock.now_ns()))
            # What it held may be what others waited for.
            self.wake_idle()

    def stop_text(self, call: Call) -> None:
        """Ends a call whose text is complete: a stop string was found in it."""
        call.is_stopped = True
        self.cancel(call)

    def prefix_names(
        self, prompt: Sequence[int], tenant: str, adapter: str = ""
    ) -> tuple[bytes, ...]:
        """By what names the blocks of a prompt of nothing but text are known."""
        # What an image's placeholders hold is not in their ids.
        if not self._prefix_block_tokens:
            return ()
        return prefix_hashes(prompt, self._prefix_block_tokens, tenant=tenant, adapter=adapter)

    def drain(self) -> None:
        """Refuses new work from now on; what was admitted is finished."""
        if not self.is_draining:
            self.is_draining = True
            self.policy.drain(self._clock.now_ns())
            self._on_change()

    def undrain(self) -> None:
        """Takes new work again.

        Raises:
            CallRefused: DRAINING, the server is being shut down.
        """
        if self.is_stopping:
            raise CallRefused(Reason.DRAINING, "the server is being shut down; that is for good")
        if self.is_draining:
            self.is_draining = False
            self.policy.undrain(self._clock.now_ns())
            self._on_change()

    def drain_replica(self, replica_id: str) -> None:
        """Places no new work on a replica from now on, also after its engine was lost.

        Raises:
            CallRefused: NOT_FOUND.
        """
        self._replica(replica_id).is_draining = True
        self.policy.drain_replica(replica_id, self._clock.now_ns())
        self.wake_idle()  # What moved away is theirs now.
        self._watch_expiry()
        self._on_change()

    def undrain_replica(self, replica_id: str) -> None:
        """Places work on a replica again.

        Raises:
            CallRefused: NOT_FOUND.
        """
        self._replica(replica_id).is_draining = False
        self.policy.undrain_replica(replica_id, self._clock.now_ns())
        self.wake_idle()
        self._on_change()

    def _replica(self, replica_id: str) -> Replica:
        for replica in self.replicas:
            if replica.replica_id == replica_id:
                return replica
        known = ", ".join(replica.replica_id for replica in self.replicas)
        raise CallRefused(
            Reason.NOT_FOUND,
            f"replica_id: no replica {replica_id[:64]!r}; expected one of {known}",
            field="replica_id",
        )

    def begin_stop(self) -> None:
        """Refuses new work for good, and ends what nothing was promised to."""
        if not self.is_stopping:
            self.is_stopping = True
            self.drain()
            for call in tuple(self._calls.values()):
                if not call.request.request_class.is_promised:
                    self.cancel(call)

    async def wait_idle(self) -> None:
        """Waits until every call has ended."""
        await self._idle.wait()

    def end_all(self) -> None:
        """Ends every live call: the server goes."""
        for call in list(self._calls.values()):
            self.cancel(call)

    async def stop(self) -> None:
        """Ends all tasks and engines. May be called twice."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stop_engines()

    def why_not(self, ended: Ended | None) -> CallRefused:
        """The "no" for a call that was admitted and not completed."""
        if ended is None:
            return CallRefused(Reason.INTERNAL, "answered before its end")
        if ended.reason in (Reason.ENGINE_LOST, Reason.NO_ENGINE):
            return CallRefused.of_ended(ended, self.restart_hint_ns())
        if ended.reason is Reason.CANCELLED and self.is_stopping:
            return CallRefused(Reason.DRAINING, "the server was shut down before it was done")
        return CallRefused.of_ended(ended)

    def restart_hint_ns(self) -> int:
        """Earliest span after which some replica may be up."""
        return min(replica.restart_hint_ns() for replica in self.replicas)

    def open(self, request_id: str) -> EngineRequest:
        """What an engine is to know of a live request, now that it starts on it."""
        call = self._calls[request_id]
        call.is_started = True
        if not call.tokens:
            return call.prompt
        # It was pushed back elsewhere, and goes on here.
        return dataclasses.replace(call.prompt, outputs=tuple(call.tokens))

    def wake_idle(self) -> None:
        """Wakes every replica that waits and may have something to do by now.

        One replica's plan can make work for another: what it pushes back, any may pull.
        """
        for replica in self.replicas:
            if replica.is_waiting and self.policy.has_work(replica.replica_id):
                replica.wake()

    def tell(self, events: Iterable[Event]) -> None:
        """Brings events to their calls."""
        calls = self._calls
        for event in events:
            if type(event) is TokenEmitted:
                call = calls[event.request_id]
                call.tokens.append(event.token)
                if call.on_token is not None:
                    call.on_token(call)
            elif type(event) is Ended:
                call = calls.pop(event.request_id)
                if call.is_stopped and event.outcome is Outcome.CANCELLED:
                    event = _completed(event)
                call.ended = event
                self.ledger.ended(call, event)
                call.on_ended(call)
        if not calls:
            self._idle.set()

    def _with_restart_hint(self, answer: Rejected) -> Rejected:
        return Rejected(
            answer.request_id, answer.reason, answer.message, self.restart_hint_ns(), None
        )

    def _watch_expiry(self) -> None:
        """Makes sure that the timer rings no later than the policy's next expiry."""
        at_ns = self.policy.next_expiry_ns()
        if at_ns is None:
            return
        if self._expiry is not None:
            if self._expiry_ns <= at_ns:
                return
            self._expiry.cancel()
        self._expiry_ns = at_ns
        self._expiry = asyncio.get_running_loop().call_at(s_from_ns(at_ns), self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self.tell(self.policy.advance(self._clock.now_ns()))
        self.wake_idle()
        self._watch_expiry()

    async def _stop_engines(self) -> None:
        results: list[Any] = await asyncio.gather(
            *(replica.stop() for replica in self.replicas), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result


def _completed(ended: Ended) -> Ended:
    """The end of a text that its service stopped: to the scheduler, its client's wish."""
    return dataclasses.replace(
        ended, outcome=Outcome.COMPLETED, reason=None, finish=FinishReason.STOP
    )
