"""First estimates: the arithmetic of published model and device sizes."""

import math

import pytest

from headway.cost_model import Accelerator, ModelShape, StepShape, first_estimate

# Llama 2/3 70B: 80 layers, 64 heads of 128, 8 KV heads (model card).
LLAMA_70B = ModelShape(parameters=70_000_000_000, layers=80, heads=64, kv_heads=8, head_dim=128)
# NVIDIA H100 SXM data sheet: 3.35 TB/s, 989 dense bf16 TFLOP/s, 80 GB.
H100 = Accelerator(
    bandwidth_bytes_per_s=3.35e12,
    flops_per_s=989e12,
    memory_bytes=80_000_000_000,
    bandwidth_share=1.0,
    flops_share=1.0,
    host_overhead_ns=0,
)


def test_a_token_of_llama_70b_has_327680_bytes_of_kv() -> None:
    """2·80·8·128·2."""
    assert LLAMA_70B.kv_bytes_per_token == 327_680


def test_200_gb_hold_about_610000_tokens_and_149_requests_of_4096() -> None:
    """200e9 / 327,680 = 610,351, and that by 4,096 is 149."""
    assert LLAMA_70B.tokens_that_fit(200_000_000_000) == 610_351
    assert LLAMA_70B.requests_that_fit(200_000_000_000, 4096) == 149


def test_100k_tokens_on_70b_are_1_4e16_flops_and_1_31e16_of_attention() -> None:
    """2·N·T and 2·L·d·T², d = 8,192."""
    matrices, attention = LLAMA_70B.prefill_flops(100_000)
    assert matrices == pytest.approx(1.4e16)
    assert attention == pytest.approx(1.31e16, rel=0.001)


def test_reading_the_weights_of_70b_takes_42_ms_on_an_h100() -> None:
    """140 GB at 3.35 TB/s."""
    assert H100.weight_read_s(LLAMA_70B) == pytest.approx(140e9 / 3.35e12)


def test_the_estimate_of_a_prompt_is_its_flops_by_the_rate() -> None:
    """A prompt in one chunk on top of reading the weights: (1.4e16 + 1.31e16) / 989e12 s."""
    model = first_estimate(LLAMA_70B, H100)
    seconds = (model.predict_ns(StepShape.of([(0, 100_000)], [])) - model.t0_ns) / 1e9
    assert seconds == pytest.approx(2.71e16 / 989e12, rel=0.001)


def test_the_estimate_of_a_decode_reads_weights_and_kv() -> None:
    """One request over 10,000 tokens of KV: (140 GB + 3.28 GB) / 3.35 TB/s, and its own FLOPs."""
    model = first_estimate(LLAMA_70B, H100)
    seconds = model.predict_ns(StepShape.of([], [10_000])) / 1e9
    flops_s = 2 * 70e9 / 989e12
    assert seconds == pytest.approx((140e9 + 3.2768e9) / 3.35e12 + flops_s, rel=1e-6)


def test_the_expected_share_of_a_rate_scales_the_time() -> None:
    """Half the bandwidth, twice the time."""
    half = Accelerator(3.35e12, 989e12, 80_000_000_000, bandwidth_share=0.5, flops_share=0.25)
    assert half.weight_read_s(LLAMA_70B) == pytest.approx(2 * H100.weight_read_s(LLAMA_70B))
    assert half.ns_per_flop == pytest.approx(4 * H100.ns_per_flop)


def test_weights_that_do_not_fit_leave_no_room_for_kv() -> None:
    """140 GB on 80 GB: no tokens, and no negative number of them."""
    assert H100.kv_tokens(LLAMA_70B) == 0
    two = Accelerator(3.35e12, 989e12, 160_000_000_000)
    assert two.kv_tokens(LLAMA_70B) == math.floor((160e9 * 0.9 - 140e9) / 327_680)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be more than 0, got 0"),
        ({"kv_heads": 7}, r"heads \(64\) must be a multiple of kv_heads \(7\)"),
    ],
)
def test_an_impossible_model_is_refused(changes: dict[str, int], message: str) -> None:
    """The message names the size."""
    sizes = {"parameters": 1, "layers": 80, "heads": 64, "kv_heads": 8, "head_dim": 128}
    with pytest.raises(ValueError, match=message):
        ModelShape(**(sizes | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops_per_s": 0.0}, "flops_per_s"),
        ({"bandwidth_share": 1.1}, "bandwidth_share"),
        ({"host_overhead_ns": -1.0}, "host_overhead_ns"),
    ],
)
def test_an_impossible_accelerator_is_refused(changes: dict[str, float], message: str) -> None:
    """The message names the rate."""
    rates: dict[str, float] = {"bandwidth_bytes_per_s": 1.0, "flops_per_s": 1.0}
    with pytest.raises(ValueError, match=message):
        Accelerator(memory_bytes=1, **(rates | changes))
