"""What PTP gains on language models: ``benchmarks/paper/run.sh ptp-ingredients-bytes`` and ``ptp-ingredients-smollm2``.

PTP heads of one target, trained by `vllm-mtpc train` on the target's own text, each with one change; measured on the
same held-out texts, so their ratios have small errors. A head that its folder holds is not trained again.

    bytes     the demo's target, on build/demo (`scripts/train_demo.sh --only text`); about ten minutes a head
    smollm2   SmolLM2-135M-Instruct, on build/ptp (`python -m benchmarks.own_text models/smollm2-135m-instruct
              --temperature 1 --tokens 52000 --out build/ptp`), measured on Spec-Bench; an hour a head on one core
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.grid import paired
from benchmarks.own_text import TEXT_FILE
from benchmarks.paper import spec_bench
from benchmarks.paper.overfit import PATCHES
from vllm_mtpc import demo
from vllm_mtpc.checkpoint.ptp_head import load_student
from vllm_mtpc.cli import main
from vllm_mtpc.data.sources import chat_prompt
from vllm_mtpc.engine.provenance import ROOT
from vllm_mtpc.eval.ptp_evaluator import DraftedWindows, collect, summarise
from vllm_mtpc.eval.text import Samples, Sampling, generate
from vllm_mtpc.hf import Target, load_target

DRAFTS = 7
RECIPE = {"head": "ptp", "window": DRAFTS + 1, "evaluation-sequences": 0}
INDEPENDENT, LARGE = {"variant": "independent"}, {"lora-rank": 64, "lora-alpha": 64}


@dataclass(frozen=True)
class Setting:
    """A target, its text and its heads."""

    target: Path
    data: Path
    prompts: Callable[[Target, int], list[Tensor]]  # of held-out texts
    stops: set[int] | None  # tokens that end them; None: the target's
    texts: int  # held-out
    tokens: int  # of each
    temperatures: tuple[float, ...]
    recipe: dict[str, Any]
    # name -> options, the row it is compared with, and a patch of the order in which u passes the tokens
    cases: dict[str, tuple[dict[str, Any], str, str | None]]


def of_demo(target: Target, count: int) -> list[Tensor]:
    """Return the beginnings of held-out texts of the demo."""
    lines = (ROOT / "build" / "demo" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [torch.tensor(json.loads(line)["prompt_ids"]) for line in lines[:count]]


def of_spec_bench(target: Target, count: int) -> list[Tensor]:
    """Return short first turns of Spec-Bench, of all tasks, in the target's chat template."""
    turns = [{"role": "user", "content": one.turns[0]} for one in spec_bench.questions(spec_bench.FILE)]
    found = [torch.tensor(chat_prompt([turn], target.tokenizer)) for turn in turns]
    short = [one for one in found if len(one) <= LONGEST]
    return short[:: len(short) // count][:count]


STEPS, LONGEST = 600, 256
LONG = {"max-steps": 3 * STEPS}
BYTES = Setting(
    demo.path("target"), ROOT / "build" / "demo" / "sampled.jsonl", of_demo, set(), 96, 96, (1.0,),
    {"max-steps": STEPS, "windows-per-step": 64, "learning-rate": 0.003, "seq-len": 160, "block-rows": 256},
    {
        "independent": (INDEPENDENT, "independent", None),
        "o-ptp": ({}, "independent", None),
        "o-ptp, the likeliest token's interval first": ({}, "independent", "likeliest first"),
        "independent, rank 64": (INDEPENDENT | LARGE, "independent, rank 64", None),
        "o-ptp, rank 64": (LARGE, "independent, rank 64", None),
        "independent, rank 64, x 3": (INDEPENDENT | LARGE | LONG, "independent, rank 64, x 3", None),
        "o-ptp, rank 64, x 3": (LARGE | LONG, "independent, rank 64, x 3", None),
    },
)  # fmt: skip
SMOLLM2 = Setting(
    ROOT / "models" / "smollm2-135m-instruct", ROOT / "build" / "ptp" / TEXT_FILE, of_spec_bench, None,
    48, 48, (1.0, 0.7),
    LARGE | {"max-steps": 450, "windows-per-step": 32, "chunk-windows": 32, "learning-rate": 0.002, "seq-len": 256,
             "block-rows": 16, "target-dtype": "float32"},
    {variant: ({"variant": variant}, "independent", None) for variant in ("independent", "o-ptp", "c-ptp")},
)  # fmt: skip


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield the row of each head; `gain`: tokens/step over those of the row it is compared with, by texts in pairs."""
    target = load_target(setting.target, torch.float32)
    prompts, samples = setting.prompts(target, setting.texts), dict[float, Samples]()
    more = {"overhang": DRAFTS + 2, "stops": setting.stops}
    for t in setting.temperatures:
        samples[t] = generate(target, prompts, setting.tokens, Sampling(t), torch.Generator().manual_seed(5), **more)
    kept = dict[tuple[str, float], DraftedWindows]()
    for name, (options, other, patch) in setting.cases.items():
        with contextlib.ExitStack() as stack:
            for one in PATCHES[patch]() if patch else ():
                stack.enter_context(one)
            for t, found in drafted(name, options, setting, target, samples).items():
                kept[name, t], figures = found, summarise(found)
                ratio, error = gain(found, kept[other, t])
                yield {
                    "what": name, "t": t, "variant": options.get("variant", "o-ptp"),
                    "tokens_per_step": figures.tokens_per_step, "standard_error": figures.standard_error,
                    "right": figures.anywhere - 1, "shuffled": figures.shuffled_tokens_per_step,
                    "gain": ratio, "gain_error": error,
                }  # fmt: skip


def drafted(
    name: str, options: dict[str, Any], setting: Setting, target: Target, samples: dict[float, Samples]
) -> dict[float, DraftedWindows]:
    """Train a head where there is none, and draft for the held-out texts of each temperature."""
    place = setting.data.parent / "recipe" / name.replace(",", "").replace("'", "").replace(" ", "-")
    if not (place / "config.json").exists():
        given = RECIPE | setting.recipe | {"target": setting.target, "data": setting.data, "out": place} | options
        main(["train", *(word for key, value in given.items() for word in (f"--{key}", str(value)))])
    student = load_student(place, target)
    return {t: collect(student, some, Sampling(t), DRAFTS) for t, some in samples.items()}


def gain(ours: DraftedWindows, theirs: DraftedWindows) -> tuple[float, float]:
    """Return tokens/step over those of other drafts for the same texts, and its standard error (pairs of texts)."""
    one, other = per_text(ours), per_text(theirs)
    mean = (other[0].sum() / other[1].sum()).item()
    difference, error = paired(one, other)
    return 1 + difference / mean, error / mean


def per_text(windows: DraftedWindows) -> tuple[Tensor, Tensor]:
    """Return tokens [S] and steps [S] of each text."""
    starts, alive = windows.steps()
    return (starts * (1 + alive.sum(-1))).sum(1).double(), starts.double().sum(1)
