"""From a file to settings, or to one line that says what is wrong with it."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from headway.config.describe import expected, expected_item, item_model, section_model
from headway.config.schema import Settings
from headway.errors import ConfigError

__all__ = ["load_settings", "parse_settings"]

_NO_FILE = "settings"


def load_settings(
    path: Path | None = None, overrides: Mapping[str, object] | None = None
) -> Settings:
    """The settings of a TOML file, or the defaults where there is none.

    Neither the environment nor any other file is looked at.

    Args:
        path: the file.
        overrides: dotted key -> value, put over the file's: what a person gave
            on the command line. Values of None are left out.

    Raises:
        ConfigError: the file cannot be read, is no TOML, has a key that is not
            known, or a value of the wrong kind or range.
    """
    if path is None:
        return _validated({}, _NO_FILE, overrides or {})
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"not UTF-8 text (byte {error.start}); expected a TOML file", source=str(path)
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror or error}; expected a TOML file", source=str(path)
        ) from error
    return parse_settings(text, source=str(path), overrides=overrides)


def parse_settings(
    text: str, *, source: str, overrides: Mapping[str, object] | None = None
) -> Settings:
    """The settings of TOML text; `source` names it in errors. See `load_settings`.

    Raises:
        ConfigError: as `load_settings`.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # tomllib names the line, save for the last one.
        last = max(1, len(text.splitlines()))
        problem = str(error).replace("at end of document", f"at line {last}, where the file ends")
        raise ConfigError(f"not valid TOML: {problem}", source=source) from error
    return _validated(document, source, overrides or {})


def _validated(document: dict[str, Any], source: str, overrides: Mapping[str, object]) -> Settings:
    for dotted, value in overrides.items():
        if value is not None:
            _put(document, dotted.split("."), value, source)
    try:
        return Settings.model_validate(document)
    except ValidationError as error:
        raise _one_line(error, source) from error


def _put(document: dict[str, Any], path: Sequence[str], value: object, source: str) -> None:
    table = document
    for depth, name in enumerate(path[:-1], start=1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"got {_shown(table)}, expected a table", source=source, key=_dotted(path[:depth])
            )
    table[path[-1]] = value


def _one_line(error: ValidationError, source: str) -> ConfigError:
    """The first problem in one line, unknown keys before all others: a
    misspelt key is often the cause of what else is wrong.
    """
    problems = error.errors(include_url=False)
    # A list is also "too short" where an item of it is wrong: say the cause only.
    problems = [one for one in problems if not _has_cause(one["loc"], problems)]
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    path = first["loc"]
    return ConfigError(_problem(first, path) + more, source=source, key=_dotted(path))


def _has_cause(path: tuple[str | int, ...], problems: Sequence[Any]) -> bool:
    """Whether another problem lies inside `path`."""
    return any(
        len(other["loc"]) > len(path) and other["loc"][: len(path)] == path for other in problems
    )


def _problem(problem: Any, path: tuple[str | int, ...]) -> str:
    kind = problem["type"]
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "value_error":
        return str(problem["ctx"]["error"])
    field = _field_at(path)
    if field is None:
        return str(problem["msg"])
    wanted = expected_item(field) if isinstance(path[-1], int) else expected(field)
    if kind == "missing":
        return f"missing; expected {wanted}"
    if kind == "finite_number":
        wanted = wanted.replace("a number", "a finite number")
    return f"got {_shown(problem['input'])}, expected {wanted}"


def _unknown(path: tuple[str | int, ...]) -> str:
    model = _model_at(path[:-1])
    siblings = list(model.model_fields) if model is not None else []
    name = str(path[-1])
    near = difflib.get_close_matches(name, siblings, n=1)
    if near:
        return f"unknown key; did you mean {_dotted((*path[:-1], near[0]))}?"
    # The right name in the wrong table.
    elsewhere = [dotted for dotted in _all_keys(Settings) if dotted.rpartition(".")[2] == name]
    if elsewhere:
        return f"unknown key; did you mean {elsewhere[0]}?"
    return f"unknown key; expected one of {', '.join(siblings)}"


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = section_model(field) or item_model(field)
        if inner is not None:
            yield from _all_keys(inner, f"{prefix}{name}.")


def _model_at(path: Sequence[str | int]) -> type[BaseModel] | None:
    model: type[BaseModel] = Settings
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = None if field is None else section_model(field) or item_model(field)
        if inner is None:
            return None
        model = inner
    return model


def _field_at(path: tuple[str | int, ...]) -> Any:
    names = [part for part in path if isinstance(part, str)]
    model = _model_at(names[:-1])
    return None if model is None or not names else model.model_fields.get(names[-1])


def _dotted(path: Sequence[str | int]) -> str:
    """`("tenants", 0, "name")` as `tenants[0].name`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _shown(value: object) -> str:
    """A value as it stands in a TOML file, cut where it is long."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
