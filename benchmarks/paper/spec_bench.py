"""Spec-Bench by task, both turns: the target's answers to its questions, and what heads accept of them.

The demo target has no chat template; a plain one is used (Vicuna's). Prompts that are longer than its positions are
truncated to their end. Answers are of the target itself; drafts are counted by the evaluator, as at the end of a
training, over all steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.demo import demo_heads
from benchmarks.paper.frame import Row
from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.checkpoint.ptp_head import load_student
from vllm_mtpc.engine import provenance
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval import circuit_evaluator, ptp_evaluator
from vllm_mtpc.eval.evaluator import StepMetrics
from vllm_mtpc.eval.text import Samples, Sampling, generate, join
from vllm_mtpc.hf import Target, bind, load_target

FILE = provenance.ROOT.parent / "shared" / "data" / "spec_bench.jsonl"
TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")  # all others are conversations of two turns
CONVERSATION, MEAN = "conversation", "mean of the tasks"
ANSWER, WINDOW = 64, 8
CIRCUITS, STUDENTS = ("ff", "btree"), ("o-ptp", "late")
HEADS = (*CIRCUITS, *STUDENTS)
TEMPERATURES = (0.7,)  # the paper's


class Question(NamedTuple):
    """task: one of TASKS, or CONVERSATION."""

    task: str
    turns: list[str]


def questions(file: Path) -> list[Question]:
    """All of the file. Raises UsageError where it is missing."""
    if not file.is_file():
        raise UsageError(f"{file.name} is missing: put Spec-Bench's questions, its question.jsonl, there")
    records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [Question(one["category"] if one["category"] in TASKS else CONVERSATION, one["turns"]) for one in records]


def prompt(turns: list[str], answers: list[str]) -> str:
    """The conversation up to the answer that is to be written; one answer less than turns."""
    said = "".join(f"USER: {turn}\nASSISTANT: {answer}\n" for turn, answer in zip(turns, answers, strict=False))
    return f"{said}USER: {turns[-1]}\nASSISTANT:"


def truncate(target: Target, text: str) -> Tensor:
    """Tokens of a text, of a long one the last ones that leave space for an answer and its drafts."""
    longest = target.config.max_position_embeddings - ANSWER - WINDOW
    return torch.tensor(target.tokenizer(text)["input_ids"][-longest:])


def answered(target: Target, asked: list[Question], sampling: Sampling, seed: int) -> tuple[Samples, int]:
    """The target's answers to every turn, and the number of truncated prompts. The first answer is in the second's
    prompt."""
    limit = target.config.max_position_embeddings - ANSWER - WINDOW
    pieces, num_truncated, said = [], 0, [[] for _ in asked]
    for turn in range(max(len(one.turns) for one in asked)):
        going = [index for index, one in enumerate(asked) if len(one.turns) > turn]
        texts = [prompt(asked[index].turns[: turn + 1], said[index]) for index in going]
        num_truncated += sum(len(target.tokenizer(text)["input_ids"]) > limit for text in texts)
        how = {"overhang": WINDOW, "stops": set(), "batch": 8}
        generator = torch.Generator().manual_seed(seed + turn)
        written = generate(target, [truncate(target, text) for text in texts], ANSWER, sampling, generator, **how)
        for index, row, start in zip(going, written.tokens, written.prompt_lengths.tolist(), strict=True):
            said[index].append(target.tokenizer.decode(row[start : start + ANSWER].tolist()))
        pieces.append(written)
    return join(pieces), num_truncated


@cache
def _loaded() -> tuple[Target, dict[str, Any]]:
    target = load_target(demo_heads.path("target"), torch.float32)
    heads = {}
    for name in CIRCUITS:
        heads[name] = load_head(demo_heads.path(name))[1].float().eval()
        bind(heads[name], target)
    return target, heads | {name: load_student(demo_heads.path(name), target) for name in STUDENTS}


def rows() -> Iterator[Row]:
    """A row for each task and temperature, then one for all."""
    target, heads = _loaded()
    every = questions(FILE)
    for temperature in TEMPERATURES:
        sampling, kept = Sampling(temperature), []
        for task in (CONVERSATION, *TASKS):
            asked = [one for one in every if one.task == task]
            samples, num_truncated = answered(target, asked, sampling, len(kept))
            row = {"task": task, "t": temperature, "answers": len(samples.tokens), "cut": num_truncated}
            row |= _accepted(target, heads, samples, sampling)
            kept.append(row)
            print(f"{task} T={temperature:g}: {row}", flush=True)
            yield row
        mean = {name: sum(row[name] for row in kept) / len(kept) for name in heads}
        errors = {f"{name}_error": math.hypot(*(row[f"{name}_error"] for row in kept)) / len(kept) for name in heads}
        yield {"task": MEAN, "t": temperature, **mean, **errors}


def _accepted(target: Target, heads: dict[str, Any], samples: Samples, sampling: Sampling) -> dict[str, float]:
    """Return tokens/step of each head and its standard error over answers."""
    found: dict[str, StepMetrics] = {}
    for name in CIRCUITS:
        contexts = circuit_evaluator.collect(heads[name], target, samples, sampling, WINDOW - 1)
        found[name] = circuit_evaluator.summarise(contexts)
    for name in STUDENTS:
        windows = ptp_evaluator.collect(heads[name], samples, sampling, WINDOW - 1)
        found[name] = ptp_evaluator.summarise(windows)
    values = {name: one.tokens_per_step for name, one in found.items()}
    return values | {f"{name}_error": one.standard_error for name, one in found.items()}


def draw(rows: Sequence[Row], file: Path) -> None:
    """Bars of each task and of their mean, a colour for each head."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panel, width = figure.subplots(), 0.8 / len(HEADS)
    for index, name in enumerate(HEADS):
        at = [place + (index - (len(HEADS) - 1) / 2) * width for place in range(len(rows))]
        errors = [row.get(f"{name}_error", 0.0) for row in rows]
        panel.bar(at, [row[name] for row in rows], width, yerr=errors, capsize=2, label=name)
    panel.set_xticks(range(len(rows)), [row["task"].replace("_", "\n") for row in rows], fontsize=8)
    panel.set(ylabel="tokens/step", ylim=(1, None))
    panel.legend(ncols=len(HEADS), fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "vllm_mtpc"}):  # the same file for the same rows
        figure.savefig(file, metadata={"Date": None})
