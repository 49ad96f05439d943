"""How long chunks and control steps take on a device: measured, fitted, kept."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from edge.runtime.backend import Backend
from headway.cost_model import CostModel, MeasuredStep, StepShape, fit
from headway.errors import HeadwayError
from headway.files import write_whole

__all__ = ["Calibration", "calibrate", "load_calibration", "save_calibration"]

_T = TypeVar("_T")
_VERSION = 1
# Ways to begin: nothing is measured before code, caches and clocks are warm.
_WARM_UP = 3
# What takes so many times the median of its like is no work of the device's: somebody else
# had the processor. Left out, and counted; while running it is met as an overrun.
_STALL = 2.5
# What control's measured worst case is multiplied with: it is a worst case of a few
# hundred, and what other programs take comes on top.
_CONTROL_MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured on one device with one model.

    Attributes:
        cost: of a chunk, with the margin that covers every point that was measured.
        control_worst_ns: of a control step, with its own margin.
        mape: mean error of predictions on points that were held out, as a share.
        num_points: chunks that were measured.
        num_stalls: of chunks and control steps, those that were left out.
    """

    cost: CostModel
    control_worst_ns: int
    mape: float
    num_points: int
    num_stalls: int = 0


def calibrate(
    backend: Backend,
    buckets: Sequence[int],
    max_scene_tokens: int,
    *,
    num_inputs: int,
    rounds: int = 6,
    now_ns: Callable[[], int] = time.perf_counter_ns,
    progress: Callable[[float], None] = lambda share: None,
) -> Calibration:
    """Measures chunks of each bucket at contexts from none to full, control between them.

    Control runs in between as it will later, so that neither finds the caches warm from
    its own last run.

    Args:
        backend: the device.
        buckets: chunk sizes, ascending.
        max_scene_tokens: longest scene.
        num_inputs: values of an observation.
        rounds: times that each point is measured.
        now_ns: a clock with the device's resolution.
        progress: told the share that is done.

    Raises:
        BackendError: the device failed.
    """
    shapes = [
        (context, bucket) for bucket in buckets for context in _contexts(max_scene_tokens, bucket)
    ]
    observation = [0.0] * num_inputs
    tokens = list(range(max(buckets)))
    for _ in range(_WARM_UP):
        for context, bucket in shapes:
            backend.prefill(
                [token % 64 for token in tokens[:bucket]], context, bucket, is_last=False
            )
        backend.control(observation, None)
    points: list[MeasuredStep] = []
    control_ns: list[int] = []
    for number in range(rounds):
        for context, bucket in shapes:
            part = [token % 64 for token in tokens[:bucket]]
            began_ns = now_ns()
            backend.prefill(part, context, bucket, is_last=False)
            ended_ns = now_ns()
            shape = StepShape.of([(context, bucket)], [])
            points.append(MeasuredStep(shape, max(1, ended_ns - began_ns)))
            began_ns = now_ns()
            backend.control(observation, None)
            control_ns.append(now_ns() - began_ns)
        progress((number + 1) / rounds)
    likes = [[one for one in points if one.shape == shape] for shape in {p.shape for p in points}]
    kept = [one for like in likes for one in _without_stalls(like, lambda one: one.elapsed_ns)]
    steady_ns = _without_stalls(control_ns, lambda span_ns: span_ns)
    num_stalls = len(points) - len(kept) + len(control_ns) - len(steady_ns)
    found = fit(kept)
    worst = max(one.elapsed_ns / found.model.predict_ns(one.shape) for one in kept)
    cost = replace(found.model, margin=max(found.model.margin, worst))
    control_worst_ns = round(_CONTROL_MARGIN * max(steady_ns))
    return Calibration(cost, control_worst_ns, found.mape, len(points), num_stalls)


def save_calibration(
    calibration: Calibration, folder: Path, *, device: str, model_digest: str, power_mode: str
) -> Path:
    """Keeps a calibration for that device, model and power mode; the file.

    Raises:
        HeadwayError: it cannot be written.
    """
    path = _path(folder, device, model_digest, power_mode)
    content = {
        "version": _VERSION,
        "device": device,
        "model_digest": model_digest,
        "power_mode": power_mode,
        **asdict(calibration),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise HeadwayError(f"{path}: cannot be written ({error.strerror or error})") from error
    return path


def load_calibration(
    folder: Path, *, device: str, model_digest: str, power_mode: str
) -> Calibration | None:
    """The calibration that was kept for exactly these; None: there is none.

    Raises:
        HeadwayError: there is a file, and it is damaged.
    """
    path = _path(folder, device, model_digest, power_mode)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        wanted = (_VERSION, device, model_digest, power_mode)
        names = ("version", "device", "model_digest", "power_mode")
        if tuple(content[name] for name in names) != wanted:
            return None
        return Calibration(
            CostModel(**content["cost"]),
            int(content["control_worst_ns"]),
            float(content["mape"]),
            int(content["num_points"]),
            int(content["num_stalls"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HeadwayError(
            f"{path}: no calibration ({error}); remove it, and calibrate again"
        ) from error


def _path(folder: Path, device: str, model_digest: str, power_mode: str) -> Path:
    plain = "".join(c if c.isalnum() else "-" for c in f"{device}-{power_mode}")
    return folder / f"{plain}-{model_digest[:16]}.json"


def _without_stalls(like: Sequence[_T], span_ns: Callable[[_T], int]) -> list[_T]:
    """Of measurements of the same thing, those that nobody held up."""
    limit_ns = _STALL * median(map(span_ns, like))
    return [one for one in like if span_ns(one) <= limit_ns]


def _contexts(max_scene_tokens: int, bucket: int) -> list[int]:
    """None, full, and three between."""
    most = max(0, max_scene_tokens - bucket)
    return sorted({round(most * share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)})
