"""What a call must look like. Each check raises with the field, what came, and what is expected.

Parsing is done here too, so that bytes which are no message at all get
INVALID_ARGUMENT as well.
"""

from math import isfinite
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from cloud.server.refused import CallRefused
from headway.outcome import Reason
from headway.v1 import robot_pb2

__all__ = [
    "MAX_IMAGES",
    "MAX_NAME_CHARACTERS",
    "MAX_STATE_SOURCES",
    "MAX_STATE_VALUES",
    "MAX_STOP_CHARACTERS",
    "MAX_STOP_STRINGS",
    "budget_ns",
    "check_generate",
    "check_id",
    "check_observation",
    "parse",
    "span_ns",
]

_NS_PER_S = 1_000_000_000
# Of google.protobuf.Duration: about 10,000 years.
_MAX_DURATION_S = 315_576_000_000
_MAX_ID_BYTES = 64
MAX_NAME_CHARACTERS = 64
MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 256
# What is looked at item by item holds up everybody else meanwhile.
MAX_IMAGES = 16
MAX_STATE_SOURCES = 256
MAX_STATE_VALUES = 2048
_MAX_TEMPERATURE = 2.0
_MAGIC = {
    robot_pb2.IMAGE_ENCODING_JPEG: ("JPEG", b"\xff\xd8\xff"),
    robot_pb2.IMAGE_ENCODING_PNG: ("PNG", b"\x89PNG\r\n\x1a\n"),
}

_M = TypeVar("_M", bound=Message)


def parse(message_type: type[_M], data: bytes) -> _M:
    """The message that `data` holds.

    Raises:
        CallRefused: INVALID, it holds none.
    """
    try:
        return message_type.FromString(data)
    except DecodeError:
        raise CallRefused(
            Reason.INVALID,
            f"the {len(data)} bytes are no {message_type.DESCRIPTOR.full_name}; "
            "expected a protobuf message of the contract headway.v1",
        ) from None


def span_ns(field: str, span: Duration) -> int:
    """`span` in nanoseconds, of either sign.

    Raises:
        CallRefused: INVALID, it is no legal Duration.
    """
    seconds, nanos = span.seconds, span.nanos
    if (
        not -_MAX_DURATION_S <= seconds <= _MAX_DURATION_S
        or not -_NS_PER_S < nanos < _NS_PER_S
        or (seconds < 0 < nanos)
        or (nanos < 0 < seconds)
    ):
        raise CallRefused.invalid(
            field,
            f"seconds {seconds} and nanos {nanos} are no legal Duration; "
            "expected |nanos| below 10^9 and both of one sign",
        )
    return seconds * _NS_PER_S + nanos


def budget_ns(field: str, span: Duration) -> int:
    """A budget in nanoseconds, more than zero.

    Raises:
        CallRefused: INVALID, it is zero, negative or no legal Duration.
    """
    budget = span_ns(field, span)
    if budget <= 0:
        raise CallRefused.invalid(
            field, f"must be more than 0, got {budget / _NS_PER_S:g} s; send the time that is left"
        )
    return budget


def check_id(field: str, value: str) -> None:
    """Passes 1 to 64 bytes of printable ASCII.

    Raises:
        CallRefused: INVALID.
    """
    if not (0 < len(value) <= _MAX_ID_BYTES and value.isascii() and value.isprintable()):
        raise CallRefused.invalid(
            field,
            f"must be 1 to {_MAX_ID_BYTES} bytes of printable ASCII, got {_shown(value)}",
        )


def check_observation(
    observation: robot_pb2.Observation, *, sees_images: bool, prefix: str = "observation."
) -> None:
    """Passes an observation that a model can look at; its budget is not looked at.

    Args:
        observation: the message.
        sees_images: whether the model has a vision encoder.
        prefix: path of the observation, for the error.

    Raises:
        CallRefused: INVALID.
    """
    check_id(prefix + "observation_id", observation.observation_id)
    state, images = observation.state, observation.images
    if not (state or images or observation.task):
        raise CallRefused.invalid(
            prefix + "state", "no data; expected a state source, an image or a task"
        )
    _check_count(prefix + "state", "state sources", len(state), MAX_STATE_SOURCES)
    _check_count(prefix + "images", "images", len(images), MAX_IMAGES)
    # Kept while they are looked at: protobuf makes a new object each time that it is asked.
    sources = list(state)
    num_values = sum([len(source.values) for source in sources])
    _check_count(prefix + "state.values", "state values", num_values, MAX_STATE_VALUES)
    for source in sources:
        _check_source(prefix, source)
    for image in images:
        _check_image(prefix, image)
    if images and not sees_images:
        raise CallRefused.invalid(
            prefix + "images", "the model has no vision encoder; send state or a task"
        )


def _check_count(field: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise CallRefused.invalid(field, f"{count:,} {what}; expected at most {most:,}")


def _check_source(prefix: str, source: robot_pb2.StateSource) -> None:
    if not _is_name(source.name):
        raise _no_name(prefix + "state.name", source.name)
    values = source.values
    if not values:
        raise CallRefused.invalid(prefix + "state.values", f"source '{source.name}' has no values")
    for named in values:
        if not isfinite(named.value):
            raise CallRefused.invalid(
                prefix + "state.values.value",
                f"{_shown(named.name)} of source '{source.name}' must be finite, got {named.value}",
            )
        name = named.name
        if not (0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()):  # As `_is_name`.
            raise _no_name(prefix + "state.values.name", name)
    if source.HasField("age"):
        _check_age(prefix + "state.age", source.age)


def _check_image(prefix: str, image: robot_pb2.Image) -> None:
    if not _is_name(image.name):
        raise _no_name(prefix + "images.name", image.name)
    if not (image.width and image.height):
        raise CallRefused.invalid(
            prefix + "images",
            f"'{image.name}' must be at least 1 × 1 pixels, got {image.width} × {image.height}",
        )
    size = len(image.data)
    if image.encoding == robot_pb2.IMAGE_ENCODING_RGB8:
        expected = image.width * image.height * 3
        if size != expected:
            raise CallRefused.invalid(
                prefix + "images.data",
                f"'{image.name}' must have {expected} bytes ({image.height} × {image.width} × 3) "
                f"as RGB8, got {size}",
            )
    elif image.encoding in _MAGIC:
        kind, magic = _MAGIC[image.encoding]
        if not image.data.startswith(magic):
            raise CallRefused.invalid(
                prefix + "images.data", f"the {size} bytes of '{image.name}' are no {kind} file"
            )
    else:
        raise CallRefused.invalid(
            prefix + "images.encoding",
            f"'{image.name}' has none that is known; expected JPEG, PNG or RGB8",
        )
    if image.HasField("age"):
        _check_age(prefix + "images.age", image.age)


def check_generate(request: robot_pb2.GenerateRequest) -> None:
    """Passes a text request whose fields are in range; its budget is not looked at.

    Raises:
        CallRefused: INVALID.
    """
    if not request.prompt:
        raise CallRefused.invalid("prompt", "is empty; expected the text to go on from")
    if request.max_tokens < 1:
        raise CallRefused.invalid("max_tokens", f"must be at least 1, got {request.max_tokens}")
    if request.priority not in robot_pb2.Priority.values():
        raise CallRefused.invalid("priority", f"{request.priority} is none of the contract's")
    if not 0 <= request.temperature <= _MAX_TEMPERATURE:
        raise CallRefused.invalid("temperature", f"must be 0 to 2, got {request.temperature:g}")
    if not 0 <= request.top_p <= 1:
        raise CallRefused.invalid("top_p", f"must be 0 to 1, got {request.top_p:g}")
    if len(request.stop) > MAX_STOP_STRINGS or not all(
        0 < len(stop) <= MAX_STOP_CHARACTERS for stop in request.stop
    ):
        raise CallRefused.invalid(
            "stop",
            f"expected at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
        )


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()


def _no_name(field: str, name: str) -> CallRefused:
    return CallRefused.invalid(
        field, f"must be 1 to {MAX_NAME_CHARACTERS} printable characters, got {_shown(name)}"
    )


def _check_age(field: str, age: Duration) -> None:
    if span_ns(field, age) < 0:
        raise CallRefused.invalid(field, "must not be negative; it is a time ago")


def _shown(value: str) -> str:
    """Enough of a client's text to recognise it by; the rest could be anything."""
    return repr(value if len(value) <= MAX_NAME_CHARACTERS else value[:32] + "…")
