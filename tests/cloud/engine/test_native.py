"""The built operations against torch's, and what becomes of a machine that cannot build them.

Expected values: torch's own operations in float64 on the very numbers that the kernels get.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from cloud.engine.errors import EngineError
from cloud.engine.native.build import build_kernels
from cloud.engine.native.library import NativeOps
from cloud.engine.spec import EngineSpec, make_executor
from cloud.engine.step_batch import PagedDecodes, StepBatch
from cloud.engine.torch_executor import TorchExecutor
from cloud.engine.torch_ops import Rotary, TorchOps
from tests.support.native import native_ops

_DTYPES = [torch.float32, torch.bfloat16]
_BLOCK_TOKENS = 16


@pytest.fixture(params=_DTYPES, ids=str)
def ops(request: pytest.FixtureRequest, kernels: Path) -> NativeOps:
    """The operations in each dtype."""
    return native_ops(request.param, kernels)


def _random(ops: NativeOps, *shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).to(ops.dtype)


def _assert_near(found: Tensor, expected: Tensor) -> None:
    """To one rounding of what is stored: 2^-8 of a bfloat16, a few of float32's 2^-24."""
    rtol = 1e-6 if found.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("width", [768, 50])
def test_a_norm_is_that_of_the_sum(ops: NativeOps, width: int) -> None:
    """With something to add and without; the sum is kept in place."""
    x, delta, weight = (_random(ops, 11, width, seed=seed) for seed in range(3))
    weight = weight[0].contiguous()
    before = x.clone()
    expected = rms_norm(x.double(), (width,), weight.double(), 1e-5)
    _assert_near(ops.add_rms_norm(x, None, weight, 1e-5), expected)
    assert torch.equal(x, before)

    found = ops.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(x, before + delta)
    _assert_near(found, rms_norm(x.double(), (width,), weight.double(), 1e-5))


@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_a_gate_is_silu_times_up(ops: NativeOps, spread: float) -> None:
    """Also where e^x leaves float32's range on either side."""
    gate_up = _random(ops, 9, 2 * 72, spread=spread)
    gate, up = gate_up.double().chunk(2, dim=-1)
    _assert_near(ops.gated(gate_up), silu(gate) * up)


@pytest.mark.parametrize("has_norm", [False, True])
def test_queries_and_keys_are_turned_and_kv_is_stored(ops: NativeOps, has_norm: bool) -> None:
    """As torch's operations do in float64; only the tokens' rows of KV change."""
    heads, kv_heads, head_dim, rows = 6, 2, 48, 10
    qkv = _random(ops, rows, heads + 2 * kv_heads, head_dim)
    kv = _random(ops, 3, _BLOCK_TOKENS, 2 * kv_heads, head_dim, seed=1)
    rotary = Rotary(*(_random(ops, rows, 1, head_dim, seed=seed) for seed in (2, 3)))
    norm = _random(ops, heads + kv_heads, head_dim, seed=4) if has_norm else None
    write_rows = torch.tensor([40, 3, 17, 18, 19, 0, 47, 33, 5, 6])
    expected, expected_kv = qkv.double(), kv.double()
    TorchOps().rotate_and_store(
        expected,
        Rotary(rotary.cos.double(), rotary.sin.double()),
        None if norm is None else norm.double(),
        1e-6,
        expected_kv,
        write_rows,
    )
    ops.rotate_and_store(qkv, rotary, norm, 1e-6, kv, write_rows)
    # Two roundings where a norm comes before the turn, of sums that may cancel.
    tolerance = 1e-5 if ops.dtype == torch.float32 else 0.1
    torch.testing.assert_close(qkv.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(kv.double(), expected_kv, rtol=0, atol=tolerance)
    stored = kv.view(-1, 2 * kv_heads, head_dim)[write_rows]
    assert torch.equal(stored, qkv[:, heads:])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(12, 4, 64), (4, 4, 128), (14, 2, 40)])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_decodes_of_any_lengths_follow_their_block_tables(
    ops: NativeOps, heads: int, kv_heads: int, head_dim: int, spread: float
) -> None:
    """Lengths that end in, at and behind a block; scores so far apart that most vanish."""
    lengths = [1, 16, 17, 100]
    tables = [torch.arange(20, 20 + -(-length // _BLOCK_TOKENS)).flip(0) for length in lengths]
    tables[3] = torch.tensor([7, 2, 9, 0, 11, 5, 4])
    sizes = torch.tensor([len(table) for table in tables])
    kv = _random(ops, 24, _BLOCK_TOKENS, 2 * kv_heads, head_dim, spread=spread)
    qkv = _random(ops, 6, heads + 2 * kv_heads, head_dim, seed=1, spread=spread)
    nothing = torch.empty(0)
    batch = StepBatch(nothing, nothing, nothing, nothing)
    batch.paged = PagedDecodes(
        torch.cat(tables), sizes.cumsum(0) - sizes, torch.tensor(lengths), max(lengths)
    )
    found = ops.attend_decodes(qkv, heads, kv, batch)
    assert found.shape == (4, heads, head_dim)
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        own = kv[table].double().flatten(0, 1)[:length].transpose(0, 1)
        expected = scaled_dot_product_attention(
            qkv[row, :heads, None].double(), own[:kv_heads], own[kv_heads:], enable_gqa=True
        ).squeeze(1)
        # A score of hundreds carries float32's rounding into its exponential.
        rtol, atol = (
            (2e-6 * spread**2, 2e-6 * spread) if ops.dtype == torch.float32 else (8e-3, 2e-2)
        )
        torch.testing.assert_close(found[row].double(), expected, rtol=rtol, atol=atol)


def test_what_is_not_a_number_stays_none(ops: NativeOps) -> None:
    """A model whose weights are broken is found out, not smoothed over."""
    broken = torch.full((2, 64), float("nan"), dtype=ops.dtype)
    weight = torch.ones(64, dtype=ops.dtype)
    assert bool(ops.add_rms_norm(broken, None, weight, 1e-5).isnan().all())
    assert bool(ops.gated(broken).isnan().all())
    infinite = torch.full((2, 64), float("inf"), dtype=ops.dtype)
    assert not bool(ops.add_rms_norm(infinite, None, weight, 1e-5).isfinite().any())


def test_they_are_built_once(tmp_path: Path) -> None:
    """The second time the library is taken from its folder; another source is another file."""
    native_ops(torch.float32, tmp_path)
    (library,) = tmp_path.iterdir()
    before = library.stat().st_mtime_ns
    assert build_kernels(tmp_path) == library
    assert library.stat().st_mtime_ns == before


def _compiler(folder: Path, script: str) -> str:
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 3", "does not build .*kernels.cpp: exited with status 3"),
        ("echo 'kernels.cpp:1: no such header' >&2; exit 1", "kernels.cpp:1: no such header"),
    ],
)
def test_a_compiler_that_fails_is_named_with_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
) -> None:
    """And nothing is left in the folder."""
    monkeypatch.setenv("CXX", _compiler(tmp_path, script))
    folder = tmp_path / "kernels"
    with pytest.raises(EngineError, match=problem) as caught:
        build_kernels(folder)
    assert "\n" not in caught.value.message
    assert not list(folder.iterdir())


def test_a_machine_without_a_compiler_runs_torchs_operations(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It says so in one line, and serves."""
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    executor = make_executor(EngineSpec("torch", str(tiny_folder), num_blocks=8))
    assert isinstance(executor, TorchExecutor)
    assert not executor.is_compiled
    said = capsys.readouterr().err
    assert said == (
        "compile: no C++ compiler: install g++ or clang++, or name one in CXX; "
        "the engine runs slower without\n"
    )


def test_a_damaged_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be loaded is to be removed, and says where it is."""
    monkeypatch.setattr(
        "cloud.engine.native.library.build_kernels", lambda folder: folder / "kernels.so"
    )
    (tmp_path / "kernels.so").write_bytes(b"not a library")
    with pytest.raises(EngineError, match=r"kernels.so cannot be loaded .*; remove it"):
        NativeOps(torch.float32, tmp_path)
