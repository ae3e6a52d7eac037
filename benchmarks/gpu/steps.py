"""Time steps of a target of real size that verify all drafts of a window: curves for `benchmarks.draft`.

    python -m benchmarks.gpu.steps --shape evabyte-6.5b --window 8 --batch 1 8 64 --json FILE

Weights are random (benchmarks/synthetic.py); the head is the smallest, as its own time is taken off the step. The
engine runs in this process. A step lasts from its begin to that of the next one, by the host's clock; its draft is
timed on a GPU by events on the stream, which are read after the cell, so that nothing waits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import synthetic
from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.process import engine_environment
from vllm_mtpc.engine.server import ON_CPU
from vllm_mtpc.report import check_file, write_json

PROG = "python -m benchmarks.gpu.steps"
STEPS = 20  # of a cell
WARM_UP = 3  # steps of a cell that are not counted
PROMPT = 16  # tokens


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", required=True, help="of benchmarks.synthetic")
    add("--window", type=int, required=True, metavar="N", help="N - 1 drafts are verified")
    add("--batch", type=int, nargs="+", required=True, metavar="B")
    add("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of the engine")
    add("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(words)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    folder = args.json.parent / f"{args.shape}-n{args.window}"
    made = ["--shape", args.shape, "--circuit", "ff", "--components", "1", "--window", str(args.window)]
    if code := synthetic.main([*made, "--out", str(folder)]):
        return code
    os.environ.update(engine_environment(), VLLM_ENABLE_V1_MULTIPROCESSING="0")  # before vLLM is imported
    import torch
    from vllm import LLM

    drafts = args.window - 1
    speculative = {"method": "mtpc", "model": str(folder / "SYNTHETIC-head"), "num_speculative_tokens": drafts}
    speculative |= {"num_speculative_tokens_per_batch_size": "off"}
    engine = {"model": str(folder / "SYNTHETIC-target"), "load_format": "dummy", "speculative_config": speculative}
    engine |= {"max_model_len": 2 * (STEPS + 8) * args.window + 64, "max_num_seqs": max(args.batch), "seed": 0}
    engine |= {"enable_prefix_caching": False, "disable_log_stats": True}
    engine |= {**({} if torch.cuda.is_available() else ON_CPU), **args.engine}
    llm = LLM(**engine)
    clock, found = Clock(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker), {}
    for turn, batch in enumerate(args.batch):
        times = sorted(_cell(llm, clock, batch, drafts, turn))
        if times:  # none: the engine cannot run so many requests; the quartile leaves out steps that were delayed
            found[batch] = round(times[len(times) // 4], 4)
    rows = [[batch, batch * args.window, ms] for batch, ms in sorted(found.items())]
    values = {"target": f"SYNTHETIC, {args.shape}", **provenance.collect(), "step_ms": rows}
    write_json(args.json, values)
    return 0 if found else 1


@dataclass
class Step:
    """Begin of a step by the host's clock; its requests and verified rows, 0 where it reads a prompt; its draft."""

    started: float
    requests: int
    rows: int
    draft: tuple[Any, Any] | None = None


class Clock:
    """Records the steps of a worker's model runner from now on."""

    def __init__(self, worker: Any) -> None:
        self.runner, self.steps = getattr(worker, "worker", worker).model_runner, list[Step]()
        self.on_gpu = self.runner.device.type == "cuda"
        is_v2 = hasattr(self.runner, "speculator")
        drafter, name = (self.runner.speculator, "propose") if is_v2 else (self.runner, "propose_draft_token_ids")
        execute, draft = self.runner.execute_model, getattr(drafter, name)

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            new = {request.req_id for request in scheduled.scheduled_new_reqs}
            tokens, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
            decoding = [n for name, n in tokens.items() if name not in new and n == 1 + len(drafts.get(name, ()))]
            decoding *= len(decoding) == len(tokens)
            self.steps.append(Step(time.perf_counter(), len(decoding), sum(decoding)))
            return execute(scheduled, *args, **kwargs)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._stamp()
            answer = draft(*args, **kwargs)
            if self.steps:
                self.steps[-1].draft = begin, self._stamp()
            return answer

        self.runner.execute_model = execute_model
        setattr(drafter, name, timed)

    def _stamp(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, requests: int, rows: int) -> Iterator[float]:
        """Yield the time of each step of so many requests and rows that another follows, without its draft."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()
        for step, later in pairwise(self.steps):
            if (step.requests, step.rows) == (requests, rows) and step.draft:
                begin, end = step.draft
                draft = begin.elapsed_time(end) if self.on_gpu else 1000 * (end - begin)
                yield 1000 * (later.started - step.started) - draft


def _cell(llm: Any, clock: Clock, batch: int, drafts: int, turn: int) -> list[float]:
    """Return ms, without the draft, of every step with all requests of the cell and all of their drafts."""
    from vllm import SamplingParams

    engine, rows = llm.llm_engine, batch * (1 + drafts)
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.dynamic_sd_lookup = [drafts] * (scheduler.scheduler_config.max_num_seqs + 1)
    vocabulary = llm.model_config.get_vocab_size()
    how = SamplingParams(temperature=1.0, max_tokens=(STEPS + WARM_UP + 2) * (drafts + 1), ignore_eos=True)
    names = [f"{turn}-{index}" for index in range(batch)]
    for index, name in enumerate(names):
        prompt = [(7 * turn + 13 * index + place) % vocabulary for place in range(PROMPT)]
        engine.add_request(name, {"prompt_token_ids": prompt}, how)
    clock.steps.clear()
    while engine.has_unfinished_requests() and sum(step.rows == rows for step in clock.steps) <= STEPS + WARM_UP:
        engine.step()
    found = [*clock.milliseconds(batch, rows)][WARM_UP:]
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return found


if __name__ == "__main__":
    sys.exit(main())
