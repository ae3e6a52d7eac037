"""Time steps of a target of real size that verify all drafts of a window: curves for `benchmarks.draft`.

    python -m benchmarks.gpu.steps --shape evabyte-6.5b --windows 8 16 --batch 1 8 64 --json FILE

Weights are random (benchmarks/synthetic.py); the head is the smallest, as its own time is taken off the step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import synthetic
from benchmarks.engine_child import started
from benchmarks.step_clock import StepClock, StepRecord, runner_of
from vllm_mtpc.bench.decodings import engine_arguments
from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.report import write_json

PROG = "python -m benchmarks.gpu.steps"
STEPS = 20  # of a cell
WARM_UP = 3  # steps of a cell that are not counted
PROMPT = 16  # tokens
Cell = tuple[int, int]  # requests, drafts of each


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", required=True, help="of benchmarks.synthetic")
    add(
        "--windows", type=int, nargs="+", required=True, metavar="N", help="an engine each, which verifies N - 1 drafts"
    )
    add("--batch", type=int, nargs="+", required=True, metavar="B")
    add("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of every engine")
    add("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(words)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    import torch

    on_gpu = torch.cuda.is_available()
    found: dict[tuple[int, int], float] = {}
    for window in args.windows:
        folder = args.json.parent / f"{args.shape}-n{window}"
        made = ["--shape", args.shape, "--circuit", "ff", "--components", "1", "--window", str(window)]
        if code := synthetic.main([*made, "--out", str(folder)]):
            return code
        longest = 2 * (STEPS + 8) * window + 64
        engine = engine_arguments(
            str(folder / "SYNTHETIC-target"), "auto", longest, max(args.batch), on_gpu, args.engine
        )
        engine |= {"load_format": "dummy", "speculative_config": speculative(folder / "SYNTHETIC-head", window)}
        wanted = [(batch, window - 1) for batch in args.batch]
        for cell in measure(engine, wanted, STEPS, 1.0, args.json.with_suffix(f".n{window}.log")):
            if cell["step_ms"] is not None:
                found[cell["batch"], cell["batch"] * (1 + cell["drafts"])] = cell["step_ms"]
    values = {"target": f"SYNTHETIC, {args.shape}", **provenance.collect()}
    write_json(args.json, {**values, "step_ms": [[*at, ms] for at, ms in sorted(found.items())]})
    return 0 if found else 1  # no cell was measured


def speculative(head: Path, window: int) -> dict[str, Any]:
    given = {"method": "mtpc", "model": str(head), "num_speculative_tokens": window - 1}
    return given | {"num_speculative_tokens_per_batch_size": "off", "min_acceptance": 0}


def measure(
    engine: dict[str, Any], wanted: Sequence[Cell], steps: int, temperature: float, log: Path
) -> Iterator[dict[str, Any]]:
    """Yield the time of every cell: batch, drafts, step_ms (without the draft); None where the engine cannot run it.

    Args:
        engine: keyword arguments of `vllm.LLM`, with a head.
        wanted: cells; the scheduler's K is set to the cell's drafts, whatever is accepted.
        steps: timed steps of a cell.
        temperature: of the requests.
        log: file of the engine's output.

    Raises:
        EngineFailed: the engine did not start or stopped.
    """
    given = {"steps": steps, "temperature": temperature}
    with started(cells, {"disable_log_stats": True, **engine}, log, given, wanted) as child:
        for _ in wanted:
            yield child.answer()


def cells(llm: Any, items: Iterator[Cell], steps: int, temperature: float) -> Iterator[dict[str, Any]]:
    """Run the cells in the engine's process; the lower quartile leaves out steps that another process delayed."""
    clock = StepClock(runner_of(llm))
    for turn, (batch, drafts) in enumerate(items):
        times = sorted(_cell(llm, clock, batch, drafts, steps, temperature, turn))
        yield {"batch": batch, "drafts": drafts, "step_ms": round(times[len(times) // 4], 4) if times else None}


def _cell(
    llm: Any, clock: StepClock, batch: int, drafts: int, steps: int, temperature: float, turn: int
) -> list[float]:
    """Return ms, without the draft, of every step with all requests of the cell and all of their drafts."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.dynamic_sd_lookup = [drafts] * (scheduler.scheduler_config.max_num_seqs + 1)
    vocabulary = llm.model_config.get_vocab_size()
    how = SamplingParams(temperature=temperature, max_tokens=(steps + WARM_UP + 2) * (drafts + 1), ignore_eos=True)
    names = [f"{turn}-{index}" for index in range(batch)]
    for index, name in enumerate(names):
        prompt = [(7 * turn + 13 * index + place) % vocabulary for place in range(PROMPT)]
        engine.add_request(name, {"prompt_token_ids": prompt}, how)

    def counts(record: StepRecord) -> bool:
        return record.is_decoding and record.requests == batch and record.rows == batch * (1 + drafts)

    clock.records.clear()
    while engine.has_unfinished_requests() and sum(map(counts, clock.records)) <= steps + WARM_UP:
        engine.step()
    found = [whole - draft for record, whole, _, draft in clock.decoding() if counts(record)][WARM_UP:]
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return found


if __name__ == "__main__":
    sys.exit(main())
