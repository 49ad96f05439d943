"""Between the robot's values and the messages of the contract."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from google.protobuf.duration_pb2 import Duration

from edge.action import Action, Timings
from edge.observation import ImageEncoding, Observation
from edge.text import FinishReason, GenerateSummary, TextPiece
from headway.clock import ns_from_s
from headway.rpc.errors import InternalError, InvalidRequestError
from headway.rpc.status import duration_from_ns
from headway.v1 import robot_pb2

__all__ = ["action_from_wire", "observation_to_wire", "sendable", "text_piece_from_wire"]

_NS_PER_S = 1_000_000_000
_ENCODINGS = {
    ImageEncoding.JPEG: robot_pb2.IMAGE_ENCODING_JPEG,
    ImageEncoding.PNG: robot_pb2.IMAGE_ENCODING_PNG,
    ImageEncoding.RGB8: robot_pb2.IMAGE_ENCODING_RGB8,
}


@contextmanager
def sendable(what: str) -> Iterator[None]:
    """Around the making of a message.

    Raises:
        InvalidRequestError: a value has no place in it: text that is not Unicode, a
            number beyond its field's range.
    """
    try:
        yield
    except ValueError as error:
        raise InvalidRequestError(f"{what} cannot be sent: {error}") from error


@sendable("the observation")
def observation_to_wire(observation: Observation, budget_ns: int) -> robot_pb2.Observation:
    """`observation` as it is sent, with what is left for the server.

    Raises:
        InvalidRequestError: see `sendable`.
    """
    message = robot_pb2.Observation(
        observation_id=observation.observation_id,
        task=observation.task,
        budget=duration_from_ns(budget_ns),
    )
    for source in observation.state:
        message.state.add(
            name=source.name,
            values=[
                robot_pb2.NamedValue(name=name, value=value)
                for name, value in source.values.items()
            ],
            age=duration_from_ns(ns_from_s(source.age_s)),
        )
    for image in observation.images:
        message.images.add(
            name=image.name,
            encoding=_ENCODINGS[image.encoding],
            width=image.width,
            height=image.height,
            data=image.data,
            age=duration_from_ns(ns_from_s(image.age_s)),
        )
    return message


def action_from_wire(
    chunk: robot_pb2.ActionChunk, observation_id: str, round_trip_ns: int
) -> Action:
    """The actions of an answer to `observation_id`.

    Raises:
        InternalError: the answer is to another observation, or is nothing that a
            robot may play.
    """
    if chunk.observation_id != observation_id:
        raise InternalError(
            f"the server answered observation '{chunk.observation_id}' where "
            f"'{observation_id}' was asked; the answer was dropped"
        )
    names = tuple(chunk.names)
    steps = tuple(tuple(step.values) for step in chunk.steps)
    period_ns = _ns(chunk.step_period)
    is_playable = (
        names
        and steps
        and period_ns > 0
        and all(len(step) == len(names) and all(map(math.isfinite, step)) for step in steps)
    )
    if not is_playable:
        raise InternalError(
            f"the answer to '{observation_id}' is no playable action (needs names, steps with "
            "one finite value a name, and a step period); it was dropped"
        )
    return Action(
        observation_id=observation_id,
        names=names,
        steps=steps,
        step_period_ns=period_ns,
        timings=_timings(chunk.timings),
        round_trip_ns=round_trip_ns,
        model=chunk.model,
    )


def text_piece_from_wire(response: robot_pb2.GenerateResponse) -> TextPiece:
    """One message of a Generate stream."""
    if not response.HasField("summary"):
        return TextPiece(response.text)
    summary = response.summary
    stopped = summary.finish_reason == robot_pb2.FINISH_REASON_STOP
    return TextPiece(
        response.text,
        GenerateSummary(
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            prompt_tokens=summary.prompt_tokens,
            output_tokens=summary.output_tokens,
            cached_tokens=summary.cached_tokens,
            timings=_timings(summary.timings),
            model=summary.model,
        ),
    )


def _timings(timings: robot_pb2.Timings) -> Timings:
    return Timings(
        queue_ns=_ns(timings.queue),
        prefill_ns=_ns(timings.prefill),
        decode_ns=_ns(timings.decode),
        total_ns=_ns(timings.total),
    )


def _ns(span: Duration) -> int:
    return span.seconds * _NS_PER_S + span.nanos
