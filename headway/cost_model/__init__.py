"""How long a step takes."""

from headway.cost_model.model import CostModel, MeasuredStep, StepShape, chunk_pairs

__all__ = ["CostModel", "MeasuredStep", "StepShape", "chunk_pairs"]
