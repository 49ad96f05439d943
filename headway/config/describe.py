"""Reads the schema: which keys there are, and what each one takes, in words."""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

__all__ = ["Key", "expected", "expected_item", "item_model", "keys", "section_model"]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the file."""

    name: str
    field: FieldInfo
    default: object  # PydanticUndefined where the key is required.

    @property
    def is_required(self) -> bool:
        """Whether the file must give it wherever its table stands."""
        return self.field.is_required()

    @property
    def description(self) -> str:
        """What the key means."""
        return self.field.description or ""

    @property
    def expected(self) -> str:
        """What the key takes, in words."""
        return expected(self.field)


def section_model(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a table, else None."""
    return _model(field.annotation)


def item_model(field: FieldInfo) -> type[BaseModel] | None:
    """The model of the items of a field that is an array of tables, else None."""
    if get_origin(field.annotation) is not tuple:
        return None
    return _model(get_args(field.annotation)[0])


def keys(model: type[BaseModel]) -> Iterator[Key]:
    """The keys of a table that are no tables themselves, in order."""
    for name, field in model.model_fields.items():
        if section_model(field) is None and item_model(field) is None:
            yield Key(name, field, field.get_default(call_default_factory=True))


def expected(field: FieldInfo) -> str:
    """What a field takes, in words: "a whole number from 0 to 65535"."""
    annotation = field.annotation
    if section_model(field) is not None:
        return "a table"
    if get_origin(annotation) is not tuple:
        return _scalar(annotation, field)
    least = _bound(field, annotated_types.MinLen)
    number = f", at least {least}" if least else ""
    if item_model(field) is not None:
        return f"an array of tables{number}"
    choices = _choices(get_args(annotation)[0])
    return (
        f"a list{number}, each {choices}" if choices else f"a list of {_item_words(field)}s{number}"
    )


def expected_item(field: FieldInfo) -> str:
    """What an item of a list takes, in words."""
    if item_model(field) is not None:
        return "a table"
    return _choices(get_args(field.annotation)[0]) or f"a {_item_words(field)}"


def _item_words(field: FieldInfo) -> str:
    return {str: "text", float: "number", int: "whole number"}[get_args(field.annotation)[0]]


def _model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _scalar(annotation: Any, field: FieldInfo) -> str:
    choices = _choices(annotation)
    if choices:
        return choices
    if get_origin(annotation) in (Union, types.UnionType):
        raise TypeError(f"the schema has a union, which no error message explains: {annotation}")
    if annotation is bool:
        return "true or false"
    if annotation is int:
        return "a whole number" + _range(field)
    if annotation is float:
        return "a number" + _range(field)
    return "a text" + _text_rule(field)


def _choices(annotation: Any) -> str:
    if get_origin(annotation) is not Literal:
        return ""
    return "one of " + ", ".join(f'"{choice}"' for choice in get_args(annotation))


def _range(field: FieldInfo) -> str:
    least, most = _bound(field, annotated_types.Ge), _bound(field, annotated_types.Le)
    above, below = _bound(field, annotated_types.Gt), _bound(field, annotated_types.Lt)
    if least is not None and most is not None:
        return f" from {least} to {most}"
    parts = []
    if above is not None:
        parts.append(f"above {above}")
    if least is not None:
        parts.append(f"of at least {least}")
    if below is not None:
        parts.append(f"below {below}")
    if most is not None:
        parts.append(f"of at most {most}")
    return " " + " and ".join(parts) if parts else ""


def _text_rule(field: FieldInfo) -> str:
    if isinstance(field.json_schema_extra, dict) and "expected" in field.json_schema_extra:
        return f" such as {field.json_schema_extra['expected']}"
    least = _bound(field, annotated_types.MinLen)
    most = _bound(field, annotated_types.MaxLen)
    if least and most:
        return f" of {least} to {most} characters"
    return ", not empty" if least else ""


def _bound(field: FieldInfo, kind: type) -> Any:
    """The value of the field's constraint of this kind, None where it has none."""
    for rule in field.metadata:
        if isinstance(rule, kind):
            (value,) = (getattr(rule, name) for name in rule.__dataclass_fields__)  # type: ignore[attr-defined]
            return value
    return None
