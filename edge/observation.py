"""What a robot sees and wants at one instant, checked before anything is sent."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from headway.rpc.errors import InvalidRequestError

__all__ = ["Image", "ImageEncoding", "Observation", "StateSource"]

MAX_ID_BYTES = 64


class ImageEncoding(Enum):
    """How the bytes of an image are to be read."""

    JPEG = "jpeg"
    PNG = "png"
    RGB8 = "rgb8"  # Height × width × 3 bytes, row by row, red green blue.


@dataclass(frozen=True, slots=True)
class StateSource:
    """State values that were measured together.

    `values` maps names to SI units (m, m/s, rad, rad/s, N, V), or to a fraction
    of one; their order is kept. `age_s` is how old they were when the
    observation was put together.

    Raises:
        InvalidRequestError: no name, no values, a value that is not finite, or
            an age that is negative or not finite.
    """

    name: str
    values: Mapping[str, float]
    age_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks, and keeps a copy that nobody else can change."""
        if not self.name:
            raise InvalidRequestError("a state source needs a name, such as 'odometry'")
        if not self.values:
            raise InvalidRequestError(f"state source '{self.name}' has no values; leave it out")
        for name, value in self.values.items():
            if not math.isfinite(value):
                raise InvalidRequestError(
                    f"state value '{self.name}.{name}' must be a finite number, got {value}; "
                    "leave out what was not measured"
                )
        _check_age(f"state source '{self.name}'", self.age_s)
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))


@dataclass(frozen=True, slots=True)
class Image:
    """One camera's picture.

    `data` is a JPEG or PNG file, or for RGB8 exactly height × width × 3 bytes.

    Raises:
        InvalidRequestError: no name, no pixels, the wrong number of bytes, or an
            age that is negative or not finite.
    """

    name: str
    encoding: ImageEncoding
    width: int
    height: int
    data: bytes = field(repr=False)
    age_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks what can be checked without decoding the picture."""
        if not self.name:
            raise InvalidRequestError("an image needs the name of its camera, such as 'front'")
        if self.width < 1 or self.height < 1:
            raise InvalidRequestError(
                f"image '{self.name}' must be at least 1 × 1 pixels, "
                f"got {self.width} × {self.height}"
            )
        expected = self.width * self.height * 3
        if self.encoding is ImageEncoding.RGB8 and len(self.data) != expected:
            raise InvalidRequestError(
                f"image '{self.name}' must have {expected} bytes "
                f"({self.height} × {self.width} × 3), got {len(self.data)}"
            )
        if not self.data:
            raise InvalidRequestError(f"image '{self.name}' has no data")
        _check_age(f"image '{self.name}'", self.age_s)


@dataclass(frozen=True, slots=True)
class Observation:
    """One question to the cloud: what to do next.

    `observation_id` is chosen by the robot, unique for it, and echoed in the
    answer: 1 to 64 printable ASCII characters. There must be a task, a state
    source or an image.

    Raises:
        InvalidRequestError: the id is not as said, or there is no data.
    """

    observation_id: str
    task: str = ""
    state: tuple[StateSource, ...] = ()
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        """Checks the id, and that there is something to see."""
        name = self.observation_id
        if not (1 <= len(name) <= MAX_ID_BYTES and name.isascii() and name.isprintable()):
            raise InvalidRequestError(
                f"observation_id must be 1 to {MAX_ID_BYTES} printable ASCII characters, "
                f"got {name!r}"
            )
        if not (self.task or self.state or self.images):
            raise InvalidRequestError(
                f"observation '{name}' has no data; give it a task, a state source or an image"
            )


def _check_age(what: str, age_s: float) -> None:
    if not (math.isfinite(age_s) and age_s >= 0):
        raise InvalidRequestError(
            f"the age of {what} must be a finite number of seconds of at least 0, got {age_s}"
        )
