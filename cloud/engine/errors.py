"""What the engine raises on purpose."""

from headway.errors import HeadwayError

__all__ = ["CheckpointError", "EngineError", "PlanError"]


class EngineError(HeadwayError):
    """The engine cannot do what it was asked for."""


class CheckpointError(EngineError):
    """A checkpoint folder is not one that this engine can run.

    Attributes:
        path: the file or folder at fault.
    """

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = str(path)


class PlanError(EngineError):
    """A step plan contradicts what the engine was told before."""
