"""The schema documents itself: the example and the reference say what it says."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from headway.config import Settings, parse_settings
from headway.config.describe import Key, item_model, keys, section_model
from headway.config.example import example_toml, reference_markdown, toml_value

ROOT = Path(__file__).parents[3]


def every_key(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """(dotted name, key) of all that can be set."""
    for key in keys(model):
        yield prefix + key.name, key
    for name, field in model.model_fields.items():
        inner = section_model(field) or item_model(field)
        if inner is not None:
            yield from every_key(inner, f"{prefix}{name}.")


def uncommented(example: str) -> str:
    """The example with each `#key` line live."""
    return re.sub(r"(?m)^#(?=\S)", "", example)


def test_the_example_loads_to_the_defaults() -> None:
    """As it is printed: every key a comment."""
    assert parse_settings(example_toml(), source="example") == Settings()


def test_the_example_uncommented_loads_to_the_defaults() -> None:
    """What it says the defaults are, they are."""
    assert parse_settings(uncommented(example_toml()), source="example") == Settings()


def test_the_example_has_every_key() -> None:
    """Read back without the schema's help: every key, in its own table."""
    document = tomllib.loads(uncommented(example_toml()))
    for dotted, _ in every_key():
        found: object = document
        for name in dotted.split("."):
            if isinstance(found, list):
                (found,) = found
            assert isinstance(found, dict)
            assert name in found, dotted
            found = found[name]


def test_every_key_is_described_with_its_unit() -> None:
    """A name's suffix and its description agree on the unit."""
    units = {"_s": "second", "_bytes": "bytes", "_tokens": "tokens", "_per_s": "per second"}
    for dotted, key in every_key():
        assert key.description.endswith("."), dotted
        for suffix, unit in units.items():
            if dotted.endswith(suffix):
                assert unit in key.description.lower(), dotted
        assert key.expected, dotted


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (0.00005, "0.00005"),
        (1e22, "10000000000000000000000.0"),
        (3.0, "3.0"),
        ('a "b" \\', '"a \\"b\\" \\\\"'),
        (("a", "b"), '["a", "b"]'),
    ],
)
def test_values_are_written_as_toml(value: object, text: str) -> None:
    """And read back as what they were."""
    assert toml_value(value) == text
    read = tomllib.loads(f"x = {text}")["x"]
    assert (tuple(read) if isinstance(read, list) else read) == value


def test_every_key_has_a_reader() -> None:
    """A key that nothing reads would be a promise that nobody keeps."""
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for package in ("cloud", "edge", "fleet_sim")
        for path in (ROOT / package).rglob("*.py")
    )
    # The costs become a cost model in the schema itself, which has its own test.
    costs = {"t0_s", "prefill_token_s", "pair_s", "decode_s", "kv_token_s"}
    unread = {
        dotted
        for dotted, key in every_key()
        if key.name not in costs and not re.search(rf"\.{key.name}\b", sources)
    }
    # These are read through a property that has its own test.
    assert unread - {"engine.threads", "engine.kv_tokens", "engine.swap_tokens"} == set()


def test_the_reference_in_the_documentation_is_fresh() -> None:
    """The part of docs/configuration.md between its marks is what the schema gives."""
    document = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    begin, end = "<!-- reference: begin -->\n", "<!-- reference: end -->"
    written = document.partition(begin)[2].partition(end)[0].strip()
    assert written == reference_markdown().strip(), (
        "docs/configuration.md is not what the settings are. Put the output of "
        "`headway config --markdown` between its marks"
    )
