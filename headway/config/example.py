"""Writes the schema down: as a commented TOML file and as Markdown tables."""

import json
import textwrap
from collections.abc import Iterator
from decimal import Decimal

from pydantic import BaseModel

from headway.config.describe import item_model, keys, section_model
from headway.config.schema import Settings

__all__ = ["example_toml", "reference_markdown"]

_INTRODUCTION = """\
# Settings of Headway. Each key stands here with its default, behind a '#' that
# has no space after it: take that '#' away, and change the value. What is left
# out keeps its default; an unknown key is refused."""


def example_toml() -> str:
    """A file that explains every key, with each default commented out. Loads to
    the defaults as it is, and also with every `#key` line uncommented.
    """
    return "\n".join([_INTRODUCTION, *_table(Settings, "")]) + "\n"


def reference_markdown() -> str:
    """One Markdown section a table, with a row a key."""
    lines: list[str] = []
    for title, model in _tables(Settings, ""):
        lines += [f"### `{title}`", "", model.__doc__ or "", ""]
        rows = list(keys(model))
        if rows:
            lines += ["| key | default | takes | meaning |", "|---|---|---|---|"]
        for key in rows:
            default = "*required*" if key.is_required else f"`{toml_value(key.default)}`"
            takes = key.expected.replace("|", "\\|")
            lines.append(f"| `{key.name}` | {default} | {takes} | {key.description} |")
        lines += [""] if rows else []
    return "\n".join(lines).rstrip() + "\n"


def toml_value(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        # Never 5e-05: people read this.
        text = format(Decimal(repr(value)), "f")
        return text if "." in text else f"{text}.0"
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return str(value)


def _table(model: type[BaseModel], name: str) -> Iterator[str]:
    """The lines of a table and of the tables inside it."""
    if name:
        yield ""
        yield from _comment(model.__doc__ or "")
        yield f"[{name}]"
    for key in keys(model):
        yield ""
        yield from _comment(f"{key.description} Takes {key.expected}.")
        yield f"#{key.name} = {toml_value(key.default)}"
    for field_name, field in model.model_fields.items():
        dotted = f"{name}.{field_name}" if name else field_name
        section, item = section_model(field), item_model(field)
        if section is not None:
            yield from _table(section, dotted)
        elif item is not None:
            yield ""
            yield from _comment(f"{field.description or ''} One such table for each.")
            for entry in field.get_default(call_default_factory=True):
                yield from _array_entry(item, dotted, entry)


def _array_entry(model: type[BaseModel], name: str, entry: BaseModel) -> Iterator[str]:
    yield f"#[[{name}]]"
    for key in keys(model):
        yield from _comment(f"{key.description} Takes {key.expected}.")
        yield f"#{key.name} = {toml_value(getattr(entry, key.name))}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, width=78, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def _tables(model: type[BaseModel], name: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """(title, model) of every table below `model`, in the order of the file."""
    for field_name, field in model.model_fields.items():
        dotted = f"{name}.{field_name}" if name else field_name
        section, item = section_model(field), item_model(field)
        if section is not None:
            yield f"[{dotted}]", section
            yield from _tables(section, dotted)
        elif item is not None:
            yield f"[[{dotted}]]", item
