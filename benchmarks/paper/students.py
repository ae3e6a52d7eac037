"""PTP students of the toy languages, each trained once per seed and measured in everything that tables need.

``python -m benchmarks.paper.students [--minutes 60] [--jobs 2]`` trains those that the result file does not have, in
the order of `specs`, and adds each to it; a later run goes on. The tables average over the seeds that are there.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.paper import toy
from benchmarks.paper.candidates import Written
from benchmarks.paper.ptp_figures import pairs
from vllm_mtpc.engine import provenance
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.report import write_json
from vllm_mtpc.train.ptp.ptp_trainer import PtpTrainer

FILE = provenance.RESULTS / "paper-ptp-students.json"
WINDOW, STEPS, SEEDS = 16, 10_000, (0, 1, 2)
TEXTS, BATCH = 4000, 32  # texts of 48 tokens to train on, windows per step as in the paper
LENGTHS = (2, 4, 8, 16, 32, 64, 100)  # of windows that a student is measured with
INIT_STD = 0.02  # as transformers starts a Llama
CANDIDATES = (1, 4, 16, 64, 256, 1024)  # the first four for every seed, all (20 minutes) for the first
LONG = {"language": "long taxi", "window": 100}  # the paper's windows
COIN = {"language": "coin", "steps": 1500, "window": 8}
FROM_DATA = {"ptp_loss": "inverse", "steps": 3000}


def own_weights(scratch: bool) -> type[PtpTrainer]:
    """A trainer whose rows have their own layers with all weights trained, from the target's or from scratch.

    They still read the keys and values that the plain target left of the text, and its norm and lm_head.
    """

    class Own(Student):
        def adapt(self, view: nn.Module, rank: int, alpha: float, layers: Any = None) -> None:
            self.own = nn.ModuleList(_learning(layer, scratch) for layer in view.layers)
            view.layers = self.own

    class Job(PtpTrainer):
        student_class = Own

    return Job


def _learning(layer: nn.Module, scratch: bool) -> nn.Module:
    """Return a copy with its own weights and the attention function of Student."""
    made = copy.deepcopy(layer).requires_grad_(True)
    for old, new in zip(layer.modules(), made.modules(), strict=True):
        if hasattr(old, "config"):
            new.config = old.config
        if scratch and isinstance(new, nn.Linear):
            nn.init.normal_(new.weight, std=INIT_STD)
    return made


JOBS: dict[str, type[PtpTrainer]] = {
    "lora": PtpTrainer,
    "own": own_weights(scratch=False),
    "scratch": own_weights(scratch=True),
}


class Spec(NamedTuple):
    """A student; changes: language, layers (the teacher's), window, steps, job, text, or options of vllm-mtpc train."""

    variant: str
    changes: dict[str, Any]

    @property
    def name(self) -> str:
        return " ".join([self.variant, *(f"{key}={value}" for key, value in sorted(self.changes.items()))])


def specs() -> Iterator[tuple[Spec, int]]:
    """Yield students and seeds, those that most tables need first."""
    first = [Spec(variant, {}) for variant in ("o-ptp", "independent", "c-ptp")]
    first += [Spec(one.variant, COIN) for one in first]
    yield from ((spec, seed) for seed in SEEDS for spec in first)
    yield from ((Spec(one.variant, LONG), 0) for one in first[:3])
    others = [Spec("c-ptp", FROM_DATA | {"job": job}) for job in ("lora", "own", "scratch")]
    others += [Spec("c-ptp", FROM_DATA | {"job": "own", "layers": 4})]
    others += [Spec(variant, {"layers": 4}) for variant in ("o-ptp", "c-ptp", "independent")]
    others += [Spec("o-ptp", {"text": "dataset"}), Spec("c-ptp", {"text": "dataset"})]
    for variant, loss in (("o-ptp", "bce"), ("c-ptp", "reverse-kl")):
        others += [Spec(variant, {"text": "student"}), Spec(variant, {"ptp_loss": loss, "text": "student"})]
        others += [Spec(variant, {"ptp_loss": loss} | more) for more in ({}, {"text": "dataset"})]
    others += [Spec(variant, {"u_beta": b}) for b in (2.0, 0.5, 0.3) for variant in ("o-ptp", "c-ptp")]
    yield from ((spec, seed) for seed in SEEDS for spec in others)


def trained(spec: Spec, seed: int, scale: float = 1.0) -> tuple[toy.Toy, Student]:
    """Return a language and a student after ``scale`` of its steps."""
    changes = dict(spec.changes)
    language, window = changes.pop("language", "taxi"), changes.pop("window", WINDOW)
    steps, job, text = changes.pop("steps", STEPS), changes.pop("job", "lora"), changes.pop("text", "teacher")
    made = toy.make(language, window, changes.pop("layers", 2), count=TEXTS)
    if text == "student":
        changes["proposals"] = text
    if job in ("own", "scratch"):
        changes["learning_rate"] = 2e-3
    given = toy.of_language(made) if text == "dataset" else made
    steps = max(3, round(scale * steps))
    options = {"windows_per_step": BATCH, "seed": seed, **changes}
    return made, toy.train(given, window, steps, JOBS[job], variant=spec.variant, **options)


def measured(spec: Spec, seed: int, scale: float = 1.0) -> dict[str, Any]:
    """Train a student and return its entry in the file."""
    torch.set_num_threads(1)
    begun = time.monotonic()
    made, student = trained(spec, seed, scale)
    seconds, window = time.monotonic() - begun, student.config.window
    found = {n: toy.measure(made, student, n - 1) for n in LENGTHS if n <= window}
    entry: dict[str, Any] = {"variant": spec.variant, "changes": spec.changes, "seed": seed, "seconds": seconds}
    about = provenance.collect()
    entry |= {key: about[key] for key in ("time", "commit", "trees", "hardware")}
    entry["by_window"] = {n: figures(one) for n, one in found.items()}
    entry |= figures(found[window])
    if spec.variant != "o-ptp" and made.name == "taxi":
        entry["perplexities"] = {n: toy.perplexity(made, student, n) for n in found}
        entry["perplexity"] = entry["perplexities"][window]
        entry["of_teacher"] = toy.perplexity(made, None, window)
        entry["of_teacher_by_window"] = {n: toy.perplexity(made, None, n) for n in found}
    if not spec.changes:
        drawn = ("what", "spurious") if seed else ("what", "spurious", "first")
        found_pairs = pairs(made, {spec.variant: student})
        entry["pairs"] = {row["what"]: {key: row[key] for key in drawn} for row in found_pairs}
    if not spec.changes and spec.variant == "o-ptp":
        prompts = made.prompts[: max(4, round(100 * min(1, scale)))]
        entry["candidates"] = {
            count: Written(student, prompts, count, 40, Sampling()).run().tokens_per_step()
            for count in CANDIDATES[: None if scale == 1 and not seed else 4]
        }
    return entry


def figures(found: Any) -> dict[str, float]:
    """Return the cells of the tables."""
    return {
        "right": found.anywhere - 1,
        "tokens_per_step": found.tokens_per_step,
        "standard_error": found.standard_error,
        "shuffled": found.shuffled_tokens_per_step,
    }


def kept(file: Path = FILE) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))["cases"] if file.is_file() else {}


def over_seeds(
    key: str, by_seed: Mapping[int, float], of_texts: float | None = None, spread: float = 0.0
) -> dict[str, Any]:
    """Return the cell `key`, the mean over seeds, with its standard error; None: one seed without an error of texts.

    The error has two parts: that of the held-out texts, which are the same for all seeds, and that of the seeds; of one
    seed it is `spread`.
    """
    values = [*by_seed.values()]
    if len(values) > 1:
        spread = stdev(values) / math.sqrt(len(values))
    error = None if of_texts is None and len(values) == 1 else math.hypot(of_texts or 0.0, spread)
    cells = {key: fmean(values), "standard_error": error, "seeds": len(values)}
    return {**cells, "by_seed": by_seed, "of_texts": of_texts or 0.0}  # to compare two rows


def averaged(rows: Mapping[int, Mapping[str, Any]], spread: float) -> dict[str, Any]:
    """Return the means of the cells over seeds, with the standard error of tokens/step."""
    means = {key: fmean(row[key] for row in rows.values()) for key in ("right", "shuffled")}
    of_texts = fmean(row["standard_error"] for row in rows.values())
    by_seed = {seed: row["tokens_per_step"] for seed, row in rows.items()}
    return {**means, **over_seeds("tokens_per_step", by_seed, of_texts, spread)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper.students", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no student after this time")
    parser.add_argument("--jobs", type=int, default=1, help="students at once, one core each")
    parser.add_argument("--json", type=Path, default=FILE, help="the file that is added to")
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps; below 1: to try the path")
    args = parser.parse_args()
    cases, end = kept(args.json), time.monotonic() + 60 * args.minutes
    missing = [(spec, seed) for spec, seed in specs() if f"{spec.name}, seed {seed}" not in cases]
    running: dict[Future[dict[str, Any]], str] = {}
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        while running or (missing and time.monotonic() < end):
            while missing and len(running) < args.jobs and time.monotonic() < end:
                spec, seed = missing.pop(0)
                running[pool.submit(measured, spec, seed, args.scale)] = f"{spec.name}, seed {seed}"
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(done)
                cases[name] = done.result()
                write_json(args.json, {"cases": cases})
                print(f"{name}: {cases[name]['tokens_per_step']:.3f} tokens/step, {len(missing)} to start", flush=True)


if __name__ == "__main__":
    main()
