"""Text for people and planners, streamed as it is decoded."""

import asyncio
from itertools import count

from cloud.engine.api import EngineRequest, Sampling
from cloud.engine.tokenizer import Tokenizer
from cloud.scheduler.types import DeadlineCovers, Ended, FinishReason, Rejected, Request
from cloud.server.call import Call
from cloud.server.calls import Context, write_in_time
from cloud.server.dispatcher import Dispatcher
from cloud.server.identity import Identity
from cloud.server.next_action import fill_timings
from cloud.server.refused import CallRefused
from cloud.server.text import StopFilter
from cloud.server.validation import budget_ns, check_generate, parse
from headway.clock import Clock, ns_from_s
from headway.config import SchedulerSettings
from headway.outcome import Outcome, Reason, RequestClass
from headway.telemetry.trace_context import TraceParent, trace_parent_of
from headway.v1 import robot_pb2

__all__ = ["Generate"]

_CLASSES = {
    robot_pb2.PRIORITY_UNSPECIFIED: RequestClass.STANDARD,
    robot_pb2.PRIORITY_STANDARD: RequestClass.STANDARD,
    robot_pb2.PRIORITY_INTERACTIVE: RequestClass.INTERACTIVE,
    robot_pb2.PRIORITY_BATCH: RequestClass.BATCH,
}
# Read in less than the way to another thread and back takes.
_SHORT_CHARACTERS = 2048
_FINISH = {
    FinishReason.STOP: robot_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: robot_pb2.FINISH_REASON_LENGTH,
}


class _TextCall(Call):
    """A call whose reader waits for tokens as they come."""

    __slots__ = ("num_read", "woken")

    def __init__(
        self,
        request: Request,
        prompt: EngineRequest,
        arrived_ns: int,
        trace: TraceParent | None = None,
    ) -> None:
        self.num_read = 0
        self.woken = asyncio.Event()
        super().__init__(request, prompt, arrived_ns, self._wake, self._wake, trace=trace)

    def _wake(self, call: Call) -> None:
        del call
        self.woken.set()

    async def read(self) -> list[int]:
        """The tokens since the last time; waits for some. Empty: there are no more."""
        while self.num_read == len(self.tokens) and self.ended is None:
            self.woken.clear()
            await self.woken.wait()
        new = self.tokens[self.num_read :]
        self.num_read = len(self.tokens)
        return new


class Generate:
    """The Generate method.

    Args:
        dispatcher: runs the requests.
        tokenizer: of the model.
        model: its name.
        eos_tokens: with which the model ends a text.
        scheduler: target of the class where a call has no budget.
        clock: of the dispatcher.
        write_timeout_s: a reader that takes nothing for so long is dropped.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        model: str,
        eos_tokens: tuple[int, ...],
        scheduler: SchedulerSettings,
        clock: Clock,
        write_timeout_s: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._model = model
        self._eos_tokens = eos_tokens
        self._slo_ns = {
            RequestClass.INTERACTIVE: ns_from_s(scheduler.interactive.slo_s),
            RequestClass.STANDARD: ns_from_s(scheduler.standard.slo_s),
        }
        self._clock = clock
        self._write_timeout_s = write_timeout_s
        self._numbers = count(1)

    async def serve(self, data: bytes, identity: Identity, context: Context) -> None:
        """One call, from its bytes to its last message.

        Raises:
            CallRefused: it is malformed, not allowed, not admitted, or failed.
        """
        arrived_ns = self._clock.now_ns()
        message = parse(robot_pb2.GenerateRequest, data)
        try:
            call = await self._call(message, identity, context, arrived_ns)
        except CallRefused as refused:
            request_class = _CLASSES.get(message.priority, RequestClass.STANDARD)
            refused.trace = trace_parent_of(context.invocation_metadata())
            self._dispatcher.ledger.refuse(request_class, identity.tenant, refused)
            raise
        answer = self._dispatcher.submit(call)
        if isinstance(answer, Rejected):
            raise CallRefused.of_rejected(answer)
        try:
            await self._stream(call, StopFilter(message.stop), identity, context)
        finally:
            self._dispatcher.cancel(call)

    async def _call(
        self,
        message: robot_pb2.GenerateRequest,
        identity: Identity,
        context: Context,
        arrived_ns: int,
    ) -> _TextCall:
        """The request that `message` means.

        Raises:
            CallRefused: it is malformed, or not allowed.
        """
        check_generate(message)
        request_class = _CLASSES[message.priority]
        identity.require_class(request_class)
        identity.require_model(self._model)
        request_id = f"text-{next(self._numbers)}"
        prompt = await self._tokens(message.prompt)
        request = Request(
            request_id=request_id,
            tenant=identity.tenant,
            request_class=request_class,
            prompt_tokens=len(prompt),
            max_output_tokens=message.max_tokens,
            deadline_ns=self._deadline_ns(message, request_class, arrived_ns, context),
            deadline_covers=DeadlineCovers.FIRST_TOKEN,
            prefix_hashes=self._dispatcher.prefix_names(prompt, identity.tenant),
        )
        sampling = Sampling(
            temperature=message.temperature,
            top_p=message.top_p or 1.0,
            seed=message.seed,
            stop_tokens=self._eos_tokens,
        )
        return _TextCall(
            request,
            EngineRequest(request_id, prompt, sampling),
            arrived_ns,
            trace_parent_of(context.invocation_metadata()),
        )

    async def _tokens(self, prompt: str) -> tuple[int, ...]:
        """The prompt's tokens; a long text holds up nobody else meanwhile.

        Raises:
            CallRefused: TOO_LARGE, no engine's context could hold it; INVALID, it
                has no tokens at all.
        """
        context = self._dispatcher.max_context_tokens
        if len(prompt) > context * self._tokenizer.longest_token:
            raise CallRefused(
                Reason.TOO_LARGE,
                f"prompt: {len(prompt):,} characters cannot be read in {context:,} tokens, "
                "the most that an engine takes",
                field="prompt",
            )
        encode = self._tokenizer.encode
        if len(prompt) < _SHORT_CHARACTERS:
            tokens = encode(prompt)
        else:
            tokens = await asyncio.to_thread(encode, prompt)
        if not tokens:
            raise CallRefused.invalid("prompt", "the model has no tokens for any of it")
        return tokens

    def _deadline_ns(
        self,
        message: robot_pb2.GenerateRequest,
        request_class: RequestClass,
        arrived_ns: int,
        context: Context,
    ) -> int | None:
        """Instant of the first token: min(budget or the class's target, gRPC deadline)."""
        if not request_class.is_promised:
            return None
        if message.HasField("budget"):
            span_ns = budget_ns("budget", message.budget)
        else:
            span_ns = self._slo_ns[request_class]
        left_s = context.time_remaining()
        if left_s is not None:
            span_ns = min(span_ns, ns_from_s(left_s))
        elif request_class is RequestClass.INTERACTIVE and not message.HasField("budget"):
            raise CallRefused.invalid(
                "budget", "missing, and the call has no deadline; expected one of the two"
            )
        return arrived_ns + span_ns

    async def _stream(
        self, call: _TextCall, stop: StopFilter, identity: Identity, context: Context
    ) -> None:
        detokenizer = self._tokenizer.detokenizer()
        while tokens := await call.read():
            identity.require_current()
            text = stop.push("".join([detokenizer.push(token) for token in tokens]))
            if text:
                await self._write(context, robot_pb2.GenerateResponse(text=text))
            if stop.is_stopped:
                self._dispatcher.stop_text(call)
                break
        ended = call.ended
        if ended is None or not (stop.is_stopped or ended.outcome is Outcome.COMPLETED):
            raise self._dispatcher.why_not(ended)
        text = stop.push(detokenizer.finish(), is_last=True)
        await self._write(context, self._last(call, ended, text, is_stopped=stop.is_stopped))

    def _last(
        self, call: Call, ended: Ended, text: str, *, is_stopped: bool
    ) -> robot_pb2.GenerateResponse:
        """The last message: what text is left, why it ended, usage and timings."""
        finish = FinishReason.STOP if is_stopped else ended.finish or FinishReason.LENGTH
        summary = robot_pb2.GenerateSummary(
            finish_reason=_FINISH[finish],
            prompt_tokens=call.request.prompt_tokens,
            output_tokens=len(call.tokens),
            cached_tokens=ended.cached_tokens,
            model=self._model,
        )
        fill_timings(summary.timings, ended, ended.at_ns - call.arrived_ns)
        return robot_pb2.GenerateResponse(text=text, summary=summary)

    async def _write(self, context: Context, message: robot_pb2.GenerateResponse) -> None:
        await write_in_time(context, message.SerializeToString(), self._write_timeout_s)
