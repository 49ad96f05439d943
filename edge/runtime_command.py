"""`headway edge`: the on-robot runtime on this machine."""

import gc
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headway.cache import default_cache_dir
from headway.errors import HeadwayError

if TYPE_CHECKING:
    from edge.runtime.calibration import Calibration
    from edge.runtime.demo import SceneRun
    from edge.runtime.torch_backend import TorchBackend

__all__ = ["edge"]

# Bars of a histogram, and their upper bounds in ms.
_BARS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)
_BAR_WIDTH = 14


@click.group()
def edge() -> None:
    """Runs a scene model and a control model on one device, within a bound."""


@edge.command()
@click.option("--force", is_flag=True, help="Also where a calibration is kept already.")
def calibrate(*, force: bool) -> None:
    """Measures this machine's chunk times, and keeps them."""
    console = Console()
    backend = _backend()
    calibration = _calibration(console, backend, force=force)
    console.print(
        f"{calibration.num_points} chunks measured, {calibration.num_stalls} stalls left out. "
        f"A chunk: {calibration.cost.t0_ns / 1e6:.2f} ms + {calibration.cost.prefill_ns / 1e3:.1f} "
        f"µs a token + {calibration.cost.pair_ns:.1f} ns a pair; held-out error "
        f"{calibration.mape:.1%}, margin {calibration.cost.margin:.2f}. Control: at most "
        f"{calibration.control_worst_ns / 1e6:.2f} ms."
    )


@edge.command()
@click.option("--demo", is_flag=True, required=True, help="With untrained models on this CPU.")
@click.option("--scenes", type=click.IntRange(1, 50), default=3, show_default=True)
@click.option(
    "--timeline",
    type=click.Path(path_type=Path, dir_okay=False),
    help="PNG to write: what the device did when.",
)
def run(*, demo: bool, scenes: int, timeline: Path | None) -> None:
    """Reads scenes of 4,096 tokens beside control at 50 Hz, in three ways side by side."""
    del demo
    from edge.runtime.demo import planners, run_scene

    console = Console()
    console.print(
        "An untrained scene model reads 4,096 tokens; an untrained control model must answer every "
        "20 ms, on the same thread. What they say means nothing, when they say it is real."
    )
    backend = _backend()
    calibration = _calibration(console, backend)
    found: dict[str, list[SceneRun]] = {name: [] for name in planners(calibration)}
    gc.freeze()
    for number in range(scenes):
        for name, planner in planners(calibration).items():
            found[name].append(run_scene(backend, planner))
        console.print(_table(found, number + 1, scenes))
    console.print(_histogram(found))
    console.print(_meaning(found))
    if timeline is not None:
        _draw(found, timeline)
        console.print(f"Timeline: {timeline}")


@edge.command()
def check() -> None:
    """Says what this machine can run."""
    for module, name in (("torch", "torch (CPU)"), ("tensorrt", "TensorRT")):
        try:
            found = __import__(module)
        except ImportError:
            click.echo(f"{name}: not installed")
            continue
        click.echo(f"{name}: {found.__version__}")
    click.echo(f"processor: {_device()}, {os.cpu_count()} cores")


def _backend() -> "TorchBackend":
    import torch

    from edge.runtime.demo import CONTROL, SCENE
    from edge.runtime.torch_backend import TorchBackend

    torch.set_num_threads(1)
    return TorchBackend.random(SCENE, CONTROL)


def _calibration(
    console: Console, backend: "TorchBackend", *, force: bool = False
) -> "Calibration":
    from edge.runtime.calibration import calibrate as measure
    from edge.runtime.calibration import load_calibration, save_calibration
    from edge.runtime.demo import BUCKETS, CONTROL, SCENE

    folder = default_cache_dir() / "calibrations"
    key = {"device": _device(), "model_digest": backend.model_digest, "power_mode": "default"}
    found = None if force else load_calibration(folder, **key)
    if found is not None:
        console.print("Calibration: as kept ('headway edge calibrate --force' measures anew).")
        return found
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Calibrating", total=1.0)
        found = measure(
            backend,
            BUCKETS,
            SCENE.max_tokens,
            num_inputs=CONTROL.inputs,
            progress=lambda share: progress.update(task, completed=share),
        )
    save_calibration(found, folder, **key)
    return found


def _device() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _table(found: "dict[str, list[SceneRun]]", number: int, scenes: int) -> Table:
    table = Table(title=f"Scene {number} of {scenes}", box=None, pad_edge=False)
    for column in ("the scene is read", "in", "longest silence", "too late", "of ticks"):
        table.add_column(column, justify="right")
    for name, runs in found.items():
        latest = runs[-1]
        missed = sum(run.num_missed for run in runs)
        table.add_row(
            name,
            f"{latest.prefill_ns / 1e6:,.0f} ms",
            f"{latest.longest_silence_ns / 1e6:,.0f} ms",
            f"[red]{missed}[/]" if missed else "0",
            str(sum(run.num_ticks for run in runs)),
        )
    return table


def _histogram(found: "dict[str, list[SceneRun]]") -> Table:
    table = Table(title="Reactions of control, all scenes", box=None, pad_edge=False)
    table.add_column("up to", justify="right")
    for name in found:
        table.add_column(name, width=_BAR_WIDTH + 6)
    counts = {}
    for name, runs in found.items():
        reactions = [one / 1e6 for run in runs for one in run.reactions_ns]
        below = [sum(one <= bound for one in reactions) for bound in _BARS_MS]
        counts[name] = [after - before for before, after in zip([0, *below], below, strict=False)]
    most = max(max(row) for row in counts.values())
    for index, bound in enumerate(_BARS_MS):
        if not any(row[index] for row in counts.values()):
            continue
        cells = []
        for row in counts.values():
            length = -(-_BAR_WIDTH * row[index] // most)
            color = "green" if bound <= 20 else "red"
            cells.append(f"[{color}]{'█' * length}[/] {row[index] or ''}")
        table.add_row(f"{bound} ms", *cells)
    return table


def _meaning(found: "dict[str, list[SceneRun]]") -> str:
    whole = min(run.prefill_ns for run in found["in one go"])
    ours = found["bounded chunks"]
    silent = max(run.longest_silence_ns for run in found["in one go"])
    missed = sum(run.num_missed for run in ours)
    slower = min(run.prefill_ns for run in ours) / whole
    late = "none was too late" if not missed else f"{missed} were too late"
    return (
        f"In one go control is silent for {silent / 1e6:,.0f} ms. In bounded chunks the scene "
        f"takes {slower:.1f} times as long, and of control's answers {late}."
    )


def _draw(found: "dict[str, list[SceneRun]]", path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise HeadwayError("a timeline needs matplotlib. Run: pip install 'headway[sim]'") from None
    figure = Figure(figsize=(14, 1.3 + 1.1 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, runs) in zip(panels, found.items(), strict=True):
        chunks = [one for one in runs[-1].spans if not one.is_control]
        control = [one for one in runs[-1].spans if one.is_control]
        panel.broken_barh(
            [(one.start_ns / 1e6, (one.end_ns - one.start_ns) / 1e6) for one in chunks],
            (0, 1),
            color="tab:blue",
            label="scene",
            edgecolor="white",
            linewidth=0.2,
        )
        # Shorter than a pixel, and what it is about.
        panel.vlines(
            [one.start_ns / 1e6 for one in control], 0, 1.15, color="tab:orange", label="control"
        )
        panel.set(yticks=[])
        panel.set_ylabel(name, rotation=0, ha="right", va="center")
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[0].legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    panels[0].set_title("What the device does", loc="left")
    panels[-1].set_xlabel("ms since the scene came")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise HeadwayError(f"{path}: cannot be written ({error})") from error
