"""The device's thread, calibration, and what is kept of it. No times are asserted."""

import itertools
import json
import random
import threading
from pathlib import Path

import pytest

from edge.runtime.calibration import (
    Calibration,
    calibrate,
    load_calibration,
    save_calibration,
)
from edge.runtime.device import ControlResult
from edge.runtime.planner import InfeasibleBudgetError, ReactionConfig
from edge.runtime.runtime import EdgeRuntime
from edge.runtime.shapes import ControlShape, SceneShape
from edge.runtime.simulated import SimulatedBackend
from edge.runtime.torch_backend import TorchBackend
from headway.clock import VirtualClock
from headway.cost_model import CostModel
from headway.errors import HeadwayError

MS = 1_000_000
US = 1_000
SHAPE = SceneShape(
    vocabulary=64, width=32, layers=1, heads=2, kv_heads=1, hidden=48, max_tokens=256
)
# Generous: this machine may be busy with anything.
CONFIG = ReactionConfig(
    buckets=(16, 64), max_scene_tokens=256, control_worst_ns=50 * MS, query_bound_ns=10_000 * MS
)
COST = CostModel(t0_ns=1.0 * MS, prefill_ns=1.0 * US, margin=2.0)


@pytest.fixture(autouse=True)
def _leaves_no_thread() -> object:
    """Whatever happened, none of the runtime's threads is left."""
    yield
    assert [one for one in threading.enumerate() if one.name == "headway-device"] == []


def backend() -> TorchBackend:
    """A small one."""
    return TorchBackend.random(SHAPE, ControlShape(inputs=2, hidden=8, layers=2, outputs=2))


def test_scenes_are_read_and_queries_answered_meanwhile() -> None:
    """With the newest complete scene; the older one is told that it was replaced."""
    with EdgeRuntime(backend(), CONFIG, COST) as runtime:
        before = runtime.query((0.1, 0.2)).result(30)
        end = runtime.submit([1] * 200).result(30)
        after = runtime.query((0.1, 0.2)).result(30)
    assert (before.scene_epoch, after.scene_epoch) == (0, end.epoch)
    assert before.values != after.values
    assert end.is_complete
    report = runtime.report()
    assert (report.scenes, report.queries.count) == (1, 2)


def test_ticks_come_by_themselves() -> None:
    """With what is observed at each."""
    results: list[ControlResult] = []
    came = threading.Event()

    def note(result: ControlResult) -> None:
        results.append(result)
        if len(results) == 5:
            came.set()

    config = ReactionConfig(
        buckets=(16,), max_scene_tokens=256, control_worst_ns=1 * MS, period_ns=20 * MS
    )
    with EdgeRuntime(
        backend(), config, COST, observe=lambda: (1.0, 1.0), on_control=note
    ) as runtime:
        assert came.wait(30)
        assert runtime.tick_bound_ns == 1 * MS
    assert all(result.values is not None for result in results)
    assert [one.number for one in results] == sorted({one.number for one in results})


def test_what_is_infeasible_never_starts() -> None:
    """No thread, no device: the error says what would do."""
    tight = ReactionConfig(
        buckets=(16,), max_scene_tokens=256, control_worst_ns=50 * MS, query_bound_ns=51 * MS
    )
    with pytest.raises(InfeasibleBudgetError, match="would do"):
        EdgeRuntime(backend(), tight, COST)


def test_impossible_calls_fail_alone() -> None:
    """An empty scene; the next one is read."""
    with EdgeRuntime(backend(), CONFIG, COST) as runtime:
        with pytest.raises(ValueError, match="1 to 256 tokens"):
            runtime.submit([]).result(30)
        assert runtime.submit([1]).result(30).is_complete


def test_a_scene_is_replaced_by_a_newer_one() -> None:
    """Its future says so."""
    with EdgeRuntime(backend(), CONFIG, COST) as runtime:
        ends = [runtime.submit([1] * 256) for _ in range(20)]
        assert ends[-1].result(30).is_complete
        told = [one.result(30) for one in ends]
    assert all(one.is_complete or "newer scene" in one.problem for one in told)


def test_a_bug_in_a_callback_ends_the_runtime_and_is_told() -> None:
    """Not swallowed by the thread."""
    config = ReactionConfig(
        buckets=(16,), max_scene_tokens=256, control_worst_ns=1 * MS, period_ns=20 * MS
    )

    def broken(result: ControlResult) -> None:
        raise RuntimeError("a bug")

    runtime = EdgeRuntime(backend(), config, COST, on_control=broken)
    runtime.start()
    for thread in threading.enumerate():
        if thread.name == "headway-device":
            thread.join(30)
    with pytest.raises(RuntimeError, match="a bug"):
        runtime.close()


def test_calibration_finds_what_the_device_takes() -> None:
    """The coefficients of a simulated device, from its own times; noise goes to the margin."""
    clock, rng = VirtualClock(), random.Random(1)
    true = CostModel(t0_ns=0.3 * MS, prefill_ns=12.0 * US, pair_ns=9.0)
    device = SimulatedBackend(true, 2 * MS, clock, chunk_noise=lambda: rng.uniform(0.99, 1.01))
    found = calibrate(device, (32, 128, 512), 4096, num_inputs=4, now_ns=clock.now_ns)
    assert found.cost.t0_ns == pytest.approx(true.t0_ns, rel=0.1)
    assert found.cost.prefill_ns == pytest.approx(true.prefill_ns, rel=0.05)
    assert found.cost.pair_ns + found.cost.kv_ns / 512 == pytest.approx(true.pair_ns, rel=0.1)
    assert found.mape < 0.02
    assert 1.0 <= found.cost.margin < 1.1
    assert found.control_worst_ns == 3 * MS  # 2 ms, and half as much again.
    assert found.num_points == 6 * 3 * 5


def test_calibration_covers_every_point_save_for_stalls() -> None:
    """Twice the usual is within the margin; ten times is somebody else's doing, and counted."""
    clock, count = VirtualClock(), itertools.count()
    device = SimulatedBackend(
        CostModel(t0_ns=1.0 * MS, prefill_ns=10.0 * US),
        MS,
        clock,
        chunk_noise=lambda: {50: 2.0, 60: 10.0}.get(next(count), 1.0),
    )
    found = calibrate(device, (32, 128), 1024, num_inputs=1, now_ns=clock.now_ns)
    assert 1.9 <= found.cost.margin <= 2.1
    assert found.num_stalls == 1


def test_a_calibration_is_kept_for_exactly_one_device_model_and_mode(tmp_path: Path) -> None:
    """Any other has none; a damaged one is said so in one line."""
    found = Calibration(COST, 3 * MS, 0.04, 90)
    key = {"device": "NVIDIA Orin", "model_digest": "a" * 64, "power_mode": "15W"}
    path = save_calibration(found, tmp_path, **key)
    assert load_calibration(tmp_path, **key) == found
    for name, other in (("device", "x"), ("model_digest", "b" * 64), ("power_mode", "30W")):
        assert load_calibration(tmp_path, **{**key, name: other}) is None
    same_start = {**key, "model_digest": "a" * 63 + "b"}
    assert load_calibration(tmp_path, **same_start) is None
    path.write_text(json.dumps({"version": 1}))
    with pytest.raises(HeadwayError, match="remove it") as caught:
        load_calibration(tmp_path, **key)
    assert "\n" not in caught.value.message


def test_a_refit_goes_by_what_was_measured() -> None:
    """Of the scenes that were read, and of the calibration's points beside them."""
    with EdgeRuntime(backend(), CONFIG, COST) as runtime:
        with pytest.raises(ValueError, match="steps"):
            runtime.refit()
        for length in (16, 64, 200, 256):
            assert runtime.submit([1] * length).result(30).is_complete
        cost = runtime.refit()
    assert cost != COST
    assert cost.t0_ns + cost.prefill_ns > 0
