"""Observations: what is wrong is said before anything is sent."""

import math

import pytest

from edge.observation import Image, ImageEncoding, Observation, StateSource
from headway.rpc.errors import InvalidRequestError


def test_an_observation_without_data_is_refused() -> None:
    """Neither task, nor state, nor image."""
    with pytest.raises(InvalidRequestError, match="'o-1' has no data; give it a task"):
        Observation("o-1")


@pytest.mark.parametrize("name", ["", "x" * 65, "tab\t", "ö", "new\nline"])
def test_an_id_is_1_to_64_printable_ascii_characters(name: str) -> None:
    """As the contract says."""
    with pytest.raises(InvalidRequestError, match="observation_id must be 1 to 64"):
        Observation(name, task="go")


def test_the_longest_id_is_taken() -> None:
    """64 characters are not too many."""
    assert Observation("x" * 64, task="go").observation_id == "x" * 64


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_state_value_must_be_finite(value: float) -> None:
    """The line names source and value."""
    with pytest.raises(InvalidRequestError, match=r"'odometry\.x' must be a finite number"):
        StateSource("odometry", {"y": 0.0, "x": value})


@pytest.mark.parametrize("age_s", [-0.1, math.nan, math.inf])
def test_an_age_must_be_finite_and_not_negative(age_s: float) -> None:
    """Data from the future is a clock error."""
    with pytest.raises(InvalidRequestError, match="age of state source 'odometry'"):
        StateSource("odometry", {"x": 0.0}, age_s)


def test_a_state_source_keeps_its_own_copy() -> None:
    """What the robot changes later does not change what it saw."""
    values = {"x": 1.0}
    source = StateSource("odometry", values)
    values["x"] = math.nan
    assert source.values["x"] == 1.0


def test_rgb8_must_have_exactly_its_bytes() -> None:
    """Height × width × 3, no byte more or less."""
    assert Image("front", ImageEncoding.RGB8, 4, 2, bytes(24)).width == 4
    for size in (0, 23, 25):
        with pytest.raises(InvalidRequestError, match=r"24 bytes \(2 × 4 × 3\), got"):
            Image("front", ImageEncoding.RGB8, 4, 2, bytes(size))


def test_an_image_needs_pixels_and_data() -> None:
    """No empty pictures."""
    with pytest.raises(InvalidRequestError, match="at least 1 × 1"):
        Image("front", ImageEncoding.JPEG, 0, 2, b"x")
    with pytest.raises(InvalidRequestError, match="has no data"):
        Image("front", ImageEncoding.JPEG, 4, 2, b"")
