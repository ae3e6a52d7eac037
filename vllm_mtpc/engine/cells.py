"""What a step and a draft take inside an engine: steps of exactly so many requests, with exactly so many drafts each.

The scheduler's K is set from outside, whatever is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_mtpc.engine.child import started
from vllm_mtpc.engine.steps import StepClock, StepRecord, runner_of

Cell = tuple[int, int]  # requests, drafts of each
WARM_UP = 3  # steps of a cell that are not counted
PROMPT = 16  # tokens


def measure(
    engine: dict[str, Any], wanted: Sequence[Cell], steps: int, temperature: float, log: Path
) -> Iterator[dict[str, Any]]:
    """One dict per cell: batch, drafts, step_ms (without the draft), draft_ms. Raises EngineFailed.

    engine: keyword arguments of `vllm.LLM`, with a head. A cell that the engine cannot run has no times (None).
    """
    given = {"steps": steps, "temperature": temperature}
    with started(f"{__name__}:times", {"disable_log_stats": True, **engine}, log, given, wanted) as child:
        for _ in wanted:
            yield child.answer()


def times(llm: Any, items: Iterator[Any], steps: int, temperature: float) -> Iterator[dict[str, Any]]:
    """The job: one answer per cell."""
    clock = StepClock(runner_of(llm))
    for turn, (batch, drafts) in enumerate(items):
        yield _cell(llm, clock, (batch, drafts), steps, temperature, turn)


def _cell(llm: Any, clock: StepClock, cell: Cell, steps: int, temperature: float, turn: int) -> dict[str, Any]:
    from vllm import SamplingParams

    batch, drafts = cell
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.dynamic_sd_lookup = [drafts] * (scheduler.scheduler_config.max_num_seqs + 1)
    vocabulary = llm.model_config.get_vocab_size()
    how = SamplingParams(temperature=temperature, max_tokens=(steps + WARM_UP + 2) * (drafts + 1), ignore_eos=True)
    names = [f"{turn}-{index}" for index in range(batch)]
    for index, name in enumerate(names):
        prompt = [(7 * turn + 13 * index + place) % vocabulary for place in range(PROMPT)]
        engine.add_request(name, {"prompt_token_ids": prompt}, how)
    clock.clear()
    while (
        engine.has_unfinished_requests() and sum(_counts(record, cell) for record in clock.records) <= steps + WARM_UP
    ):
        engine.step()
    counted = [
        (1000 * (following.started - record.started), clock.milliseconds(record, "draft"))
        for record, following in pairwise(clock.records)
        if _counts(record, cell)
    ][WARM_UP:]
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    walls, drafting = [wall - draft for wall, draft in counted], [draft for _, draft in counted]
    return {"batch": batch, "drafts": drafts, "step_ms": _typical(walls), "draft_ms": _typical(drafting)}


def _typical(times: list[float]) -> float | None:
    """The lower quartile: a step that another process delayed says nothing about what it costs."""
    return round(sorted(times)[len(times) // 4], 4) if times else None


def _counts(record: StepRecord, cell: Cell) -> bool:
    """Whether a step is one of the cell's: all of its requests, each with all of its drafts."""
    batch, drafts = cell
    return record.is_decoding and record.requests == batch and record.rows == batch * (1 + drafts)
