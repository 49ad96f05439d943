"""How long a step takes."""

from headway.cost_model.estimate import Accelerator, ModelShape, first_estimate
from headway.cost_model.fit import Fit, errors_on, fit
from headway.cost_model.model import (
    UNBOUNDED,
    CostModel,
    MeasuredStep,
    StepShape,
    chunk_pairs,
)

__all__ = [
    "UNBOUNDED",
    "Accelerator",
    "CostModel",
    "Fit",
    "MeasuredStep",
    "ModelShape",
    "StepShape",
    "chunk_pairs",
    "errors_on",
    "first_estimate",
    "fit",
]
