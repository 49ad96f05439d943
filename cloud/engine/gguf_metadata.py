"""What a GGUF file says of itself, with a clear line for what is missing."""

from pathlib import Path
from typing import Any, TypeVar

import gguf

from cloud.engine.errors import CheckpointError

__all__ = ["GgufMetadata"]

_Value = TypeVar("_Value", str, int, float)


class GgufMetadata:
    """The typed metadata of a GGUF file; says which key is missing or wrong."""

    def __init__(self, source: Path, reader: gguf.GGUFReader) -> None:
        self.source = source
        self._reader = reader

    def value(self, key: str, kind: type[_Value]) -> _Value:
        """The scalar at `key`.

        Raises:
            CheckpointError: missing, or of another kind.
        """
        value = self.get(key)
        if not isinstance(value, kind):
            expected = {str: "a text", int: "a whole number", float: "a number"}[kind]
            raise CheckpointError(self.source, f"{key} is {value!r}; expected {expected}")
        return value

    def texts(self, key: str) -> list[str]:
        """The list of texts at `key`.

        Raises:
            CheckpointError: missing, or no list.
        """
        return self._items(key, str)

    def numbers(self, key: str) -> list[int]:
        """The list of whole numbers at `key`.

        Raises:
            CheckpointError: missing, or no list.
        """
        return self._items(key, int)

    def get(self, key: str) -> Any:
        """The value at `key`, or None."""
        field = self._reader.get_field(key)
        if field is None:
            return None
        try:
            return field.contents()
        except Exception as error:  # As when opening.
            raise CheckpointError(self.source, f"{key} cannot be read ({error})") from error

    def _items(self, key: str, kind: type[_Value]) -> list[_Value]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise CheckpointError(self.source, f"{key} must be a list")
        return value
