"""What an engine process is to run, and how it travels there."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cloud.engine.api import Executor
from cloud.engine.errors import EngineError
from headway.cost_model import CostModel

if TYPE_CHECKING:
    import torch

    from cloud.engine.torch_ops import Ops

__all__ = ["EngineSpec", "make_executor"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that decides what an engine process does."""

    kind: Literal["torch", "simulated"]
    model_folder: str = ""  # A checkpoint; not used by the simulated engine.
    device: str = "cpu"
    # auto: bfloat16 where the chip multiplies it natively, else float32.
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    threads: int = 1
    block_tokens: int = 16
    num_blocks: int = 1024
    num_swap_blocks: int = 0
    max_context_tokens: int | None = None  # None: what model and blocks allow.
    # (name, folder) of each LoRA adapter that requests may name.
    adapters: tuple[tuple[str, str], ...] = ()
    # Whether what lies between the matrix multiplies runs as C++ that is built for this
    # processor before the engine is ready. Without a compiler it runs as torch's operations.
    compile: bool = True
    # Most time spent on measuring steps; each is measured once in any case.
    calibration_s: float = 2.0
    # CostModel's coefficients, for the simulated engine: t0, c_p, c_a, c_d, c_kv in ns.
    simulated_ns: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    simulated_noise: float = 0.0
    simulated_seed: int = 0

    def to_json(self) -> str:
        """One line that `from_json` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EngineSpec":
        """The spec that `to_json` wrote."""
        values = json.loads(text)
        adapters = tuple((name, folder) for name, folder in values["adapters"])
        return cls(**values | {"simulated_ns": tuple(values["simulated_ns"]), "adapters": adapters})


def make_executor(spec: EngineSpec) -> Executor:
    """The executor that `spec` asks for, in this process.

    Raises:
        EngineError: the checkpoint cannot be run, or there is too little memory.
    """
    # Each kind's imports are its own: the simulated one needs no torch.
    if spec.kind == "simulated":
        from cloud.engine.simulated import SimulatedExecutor

        return SimulatedExecutor(
            CostModel(*spec.simulated_ns),
            num_blocks=spec.num_blocks,
            block_tokens=spec.block_tokens,
            max_context_tokens=spec.max_context_tokens,
            num_swap_blocks=spec.num_swap_blocks,
            noise=spec.simulated_noise,
            seed=spec.simulated_seed,
        )
    import torch

    from cloud.engine.torch_executor import TorchExecutor

    torch.set_num_threads(spec.threads)
    dtype = spec.dtype
    if dtype == "auto":
        # torch has no public name for the question.
        on_cpu = torch.ops.mkldnn._is_mkldnn_bf16_supported  # noqa: SLF001
        has_bfloat16 = spec.device != "cpu" or on_cpu()
        dtype = "bfloat16" if has_bfloat16 else "float32"
    return TorchExecutor.load(
        Path(spec.model_folder),
        dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32,
        device=spec.device,
        block_tokens=spec.block_tokens,
        num_blocks=spec.num_blocks,
        num_swap_blocks=spec.num_swap_blocks,
        max_context_tokens=spec.max_context_tokens,
        adapters={name: Path(folder) for name, folder in spec.adapters},
        ops=_native_ops(spec, torch.bfloat16 if dtype == "bfloat16" else torch.float32),
    )


def _native_ops(spec: EngineSpec, dtype: "torch.dtype") -> "Ops | None":
    """The built operations; None where they are not wanted, or not to be had."""
    if not spec.compile or spec.device != "cpu":
        return None
    from cloud.engine.native.library import NativeOps
    from headway.cache import default_cache_dir

    try:
        return NativeOps(dtype, default_cache_dir() / "kernels")
    except EngineError as error:
        sys.stderr.write(f"compile: {error.message}; the engine runs slower without\n")
        return None
