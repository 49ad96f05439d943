"""vLLM in an interpreter of its own, for `bench_engine.py --vllm-python`.

`python vllm_worker.py FOLDER DTYPE eager|compiled` loads the checkpoint and says
"ready". Each line on standard input, {"prompts": [[int]], "num_outputs": int}, is
answered with the number of tokens that came.
"""

import contextlib
import importlib
import json
import os
import sys
from typing import Any

__all__ = ["main"]


def main(folder: str, dtype: str, mode: str) -> None:
    """Answers until standard input ends."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: more than the largest batch takes.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # Where the others run too.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # In this process, as ours in its own.
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        vllm: Any = importlib.import_module("vllm")
        model = vllm.LLM(
            folder,
            dtype=dtype,
            enforce_eager=mode == "eager",
            enable_prefix_caching=False,
            max_model_len=512,
        )
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            sampling = vllm.SamplingParams(
                temperature=0, max_tokens=asked["num_outputs"], ignore_eos=True
            )
            prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
            out = model.generate(prompts, sampling, use_tqdm=False)
            num = sum(len(one.outputs[0].token_ids) for one in out)
            print(num, file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
