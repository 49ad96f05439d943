"""From an observation to a request, and from a request's end to an action chunk.

Shared by NextAction and Session, which differ only in how the answer travels.
"""

from collections.abc import Callable
from itertools import count

from cloud.engine.api import EngineRequest, Sampling
from cloud.scheduler.types import DeadlineCovers, Ended, Rejected, Request
from cloud.server.action import ActionCodec, Embodiment
from cloud.server.call import Call
from cloud.server.dispatcher import Dispatcher
from cloud.server.identity import Identity
from cloud.server.refused import CallRefused
from cloud.server.replays import ObservationKey, Replays
from cloud.server.validation import budget_ns, check_observation
from headway.outcome import Outcome, Reason, RequestClass
from headway.telemetry.trace_context import TraceParent
from headway.v1 import robot_pb2

__all__ = ["ActionCall", "ActionRequests", "fill_timings"]

_NS_PER_S = 1_000_000_000


class ActionCall(Call):
    """A call for a chunk of actions.

    Attributes:
        observation_id: of the robot.
        embodiment: of the robot.
        robot: (tenant, robot id).
        owners: told the end, once `ActionRequests` has forgotten the call: who asked,
            and who asked the same again.
    """

    __slots__ = ("embodiment", "observation_id", "owners", "robot")

    observation_id: str
    embodiment: Embodiment
    robot: tuple[str, str]
    owners: "list[Callable[[ActionCall], None]]"


class ActionRequests:
    """Asks for actions, in the name of robots.

    Args:
        codec: speaks the model's language.
        dispatcher: runs the requests.
        replays: remembers what robots asked lately.
        adapter: that chooses actions; empty for the model itself.
        sees_images: whether the model has a vision encoder.
    """

    def __init__(
        self,
        codec: ActionCodec,
        dispatcher: Dispatcher,
        replays: Replays,
        *,
        adapter: str = "",
        sees_images: bool = False,
    ) -> None:
        self._codec = codec
        self._dispatcher = dispatcher
        self._replays = replays
        self._adapter = adapter
        self._sees_images = sees_images
        self._sampling = Sampling(allowed_tokens=codec.allowed_tokens)
        self._numbers = count(1)
        # Each robot's live calls, oldest first: two at most.
        self._live: dict[tuple[str, str], list[ActionCall]] = {}

    def embodiment(self, name: str, field: str) -> Embodiment:
        """The embodiment called `name`.

        Raises:
            CallRefused: INVALID, it is not served.
        """
        found = self._codec.embodiments.get(name)
        if found is None:
            known = ", ".join(sorted(self._codec.embodiments))
            raise CallRefused.invalid(
                field, f"{name[:64]!r} is not served; expected one of {known}"
            )
        return found

    def submit(
        self,
        identity: Identity,
        robot_id: str,
        embodiment: Embodiment,
        observation: robot_pb2.Observation,
        *,
        arrived_ns: int,
        call_deadline_ns: int | None,
        on_ended: Callable[[ActionCall], None],
        trace: TraceParent | None = None,
        prefix: str = "observation.",
    ) -> ActionCall:
        """Asks for the actions that answer `observation`.

        The same observation again, by its id, is answered by the call that there is
        for it, which may have ended: then `on_ended` is told at once.

        Args:
            identity: who asks.
            robot_id: checked already.
            embodiment: of the robot.
            observation: checked here.
            arrived_ns: when it came in; its budget counts from there.
            call_deadline_ns: of the gRPC call, if it has one.
            on_ended: told the end, on the loop.
            trace: the span that the gRPC call belongs to.
            prefix: path of the observation, for errors.

        Raises:
            CallRefused: it is malformed, not allowed, or was not admitted; CONFLICT,
                its id was another observation's.
        """
        robot = (identity.tenant, robot_id)
        key = (*robot, observation.observation_id)
        try:
            identity.require_robot(robot_id)
            identity.require_class(RequestClass.INTERACTIVE)
            identity.require_model(self._codec.model)
            identity.require_adapter(self._adapter)
            check_observation(observation, sees_images=self._sees_images, prefix=prefix)
            deadline_ns = _deadline_ns(observation, arrived_ns, call_deadline_ns, prefix)
            prompt = self._codec.prompt(embodiment, observation)
            known = self._known(key, embodiment, prompt, prefix)
        except CallRefused as refused:
            # Its id may be what is wrong.
            refused.label = f"{robot_id}/{observation.observation_id[:64]}"
            refused.trace = trace
            self.refuse(identity, refused)
            raise
        if known is not None:
            self._join(known, on_ended)
            return known
        request_id = f"action-{next(self._numbers)}"
        request = Request(
            request_id=request_id,
            tenant=identity.tenant,
            request_class=RequestClass.INTERACTIVE,
            prompt_tokens=len(prompt),
            max_output_tokens=embodiment.num_tokens,
            deadline_ns=deadline_ns,
            deadline_covers=DeadlineCovers.LAST_TOKEN,
            has_fixed_output=True,
            prefix_hashes=self._dispatcher.prefix_names(prompt, identity.tenant, self._adapter),
            adapter=self._adapter,
            supersedes=self._superseded_by_next(robot),
        )
        call = ActionCall(
            request,
            EngineRequest(request_id, prompt, self._sampling, self._adapter),
            arrived_ns,
            self._ended,
            label=f"{robot_id}/{observation.observation_id}",
            trace=trace,
        )
        call.observation_id = observation.observation_id
        call.embodiment = embodiment
        call.robot = robot
        call.owners = [on_ended]
        self._live.setdefault(robot, []).append(call)
        answer = self._dispatcher.submit(call)
        if isinstance(answer, Rejected):
            self._forget(call)
            raise CallRefused.of_rejected(answer)
        self._replays.keep(key, call)
        return call

    def refuse(self, identity: Identity, refused: CallRefused) -> None:
        """Counts a request that was refused before the scheduler was asked."""
        self._dispatcher.ledger.refuse(RequestClass.INTERACTIVE, identity.tenant, refused)

    def release(self, call: ActionCall, owner: Callable[[ActionCall], None]) -> None:
        """Lets go of a call, however it stands; the last owner's leave ends it.

        May be called twice.
        """
        call.owners = [other for other in call.owners if other != owner]
        if not call.owners:
            self._dispatcher.cancel(call)

    def _known(
        self, key: ObservationKey, embodiment: Embodiment, prompt: tuple[int, ...], prefix: str
    ) -> ActionCall | None:
        """The call that answers the observation already.

        Raises:
            CallRefused: CONFLICT, it answers another one of the same id.
        """
        call = self._replays.find(key)
        if not isinstance(call, ActionCall):
            return None
        # What the model reads is all that an answer depends on; the budget, which
        # shrinks from one attempt to the next, is no part of it.
        if call.prompt.prompt != prompt or call.embodiment is not embodiment:
            raise CallRefused(
                Reason.CONFLICT,
                f"{prefix}observation_id: '{key[2]}' was another observation's; expected a new "
                "id for each observation",
                field=prefix + "observation_id",
            )
        return call

    def _join(self, call: ActionCall, on_ended: Callable[[ActionCall], None]) -> None:
        if call.ended is None:
            call.owners.append(on_ended)
        else:
            on_ended(call)

    def _ended(self, call: Call) -> None:
        if isinstance(call, ActionCall):
            self._forget(call)
            for tell in tuple(call.owners):
                tell(call)

    def _forget(self, call: ActionCall) -> None:
        live = self._live[call.robot]
        live.remove(call)
        if not live:
            del self._live[call.robot]

    def _superseded_by_next(self, robot: tuple[str, str]) -> str:
        """Id of the live request whose place the robot's next one takes, or empty.

        A robot has one running and one queued request. What runs first is never
        given up for a newer one, or a robot that asks faster than it is answered
        would never be answered.
        """
        live = self._live.get(robot, ())
        if len(live) > 1 or (live and not live[0].is_started):
            return live[-1].request.request_id
        return ""

    def fill(self, chunk: robot_pb2.ActionChunk, call: ActionCall) -> None:
        """Writes the answer to an ended call into `chunk`.

        Raises:
            CallRefused: it was not completed.
        """
        ended = call.ended
        if ended is None or ended.outcome is not Outcome.COMPLETED:
            raise self._dispatcher.why_not(ended)
        self._codec.fill(chunk, call.embodiment, call.tokens)
        chunk.observation_id = call.observation_id
        fill_timings(chunk.timings, ended, ended.at_ns - call.arrived_ns)


def _deadline_ns(
    observation: robot_pb2.Observation, arrived_ns: int, call_deadline_ns: int | None, prefix: str
) -> int:
    """The earlier one of the observation's and the call's deadline.

    Raises:
        CallRefused: INVALID, there is neither, or the budget is impossible.
    """
    if observation.HasField("budget"):
        deadline_ns = arrived_ns + budget_ns(prefix + "budget", observation.budget)
        return deadline_ns if call_deadline_ns is None else min(deadline_ns, call_deadline_ns)
    if call_deadline_ns is None:
        raise CallRefused.invalid(
            prefix + "budget", "missing, and the call has no deadline; expected one of the two"
        )
    return call_deadline_ns


def fill_timings(timings: robot_pb2.Timings, ended: Ended, total_ns: int) -> None:
    """Writes where the time went."""
    for span, span_ns in (
        (timings.queue, ended.queue_ns),
        (timings.prefill, ended.prefill_ns),
        (timings.decode, ended.decode_ns),
        (timings.total, total_ns),
    ):
        span.seconds, span.nanos = divmod(span_ns, _NS_PER_S)
