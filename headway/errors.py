"""What Headway raises for a person or a caller to act on."""

__all__ = ["ConfigError", "HeadwayError"]


class HeadwayError(Exception):
    """Base of every error that Headway raises on purpose.

    Its text is one line: what was wrong, what was expected, what to do. A
    command prints it and exits with 2. Children carry attributes, so that
    nobody has to parse the text.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(HeadwayError):
    """The configuration cannot be read, or says something impossible.

    Attributes:
        source: the file, or where else the value came from.
        key: dotted key at fault, empty where the file as a whole is.
    """

    def __init__(self, problem: str, *, source: str, key: str = "") -> None:
        super().__init__(": ".join(part for part in (source, key, problem) if part))
        self.source = source
        self.key = key
