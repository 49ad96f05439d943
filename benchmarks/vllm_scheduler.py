"""vLLM's scheduler in an interpreter of its own, for `bench_scheduler.py --vllm-python`.

`python vllm_scheduler.py FOLDER COUNT [COUNT ...]`, with a small checkpoint in FOLDER: for each
count of requests that decode, a line with the CPU time of schedule + update, in ns, of each of
`_STEPS` steps as a JSON list. No model runs: each request is given the token that it waits for.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from typing import Any

__all__ = ["main"]

_STEPS = 200
_PROMPT = 16
_OUTPUT = 400


def main(folder: str, *counts: str) -> None:
    """Prints a line a count."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: more than the largest batch takes.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # So that the scheduler is at hand.
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        vllm: Any = importlib.import_module("vllm")
        largest = max(map(int, counts))
        model = vllm.LLM(
            folder,
            enforce_eager=True,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            max_model_len=_PROMPT + _OUTPUT,
            max_num_seqs=largest,
            max_num_batched_tokens=max(8192, largest * _PROMPT),
        )
        scheduler = model.llm_engine.engine_core.engine_core.scheduler
        for count in map(int, counts):
            print(json.dumps(_measure(vllm, scheduler, count)), file=answers, flush=True)


def _measure(vllm: Any, scheduler: Any, count: int) -> list[int]:
    request: Any = importlib.import_module("vllm.v1.request")
    names = [f"{count}-{number}" for number in range(count)]
    for name in names:
        sampling = vllm.SamplingParams(max_tokens=_OUTPUT, ignore_eos=True)
        scheduler.add_request(request.Request(name, list(range(_PROMPT)), sampling, None))
    for _ in range(4):
        _step(scheduler)  # The prompts, and what is made at first use.
    samples = [_step(scheduler) for _ in range(_STEPS)]
    scheduler.finish_requests(names, request.RequestStatus.FINISHED_ABORTED)
    _step(scheduler)
    return samples


def _step(scheduler: Any) -> int:
    outputs: Any = importlib.import_module("vllm.v1.outputs")
    started_ns = time.thread_time_ns()
    plan = scheduler.schedule()
    planned_ns = time.thread_time_ns()
    names = list(plan.num_scheduled_tokens)
    result = outputs.ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=[[7] for _ in names],
    )
    ready_ns = time.thread_time_ns()
    scheduler.update_from_output(plan, result)
    return planned_ns - started_ns + time.thread_time_ns() - ready_ns


if __name__ == "__main__":
    main(*sys.argv[1:])
