"""What limits PTP on a language model: ``benchmarks/paper/run.sh ptp-ingredients-bytes``.

PTP heads of the demo's target, trained by `vllm-mtpc train` on its own text (`scripts/train_demo.sh --only text`), each
with one change; measured on the same held-out texts, so their ratios have small errors. Heads that build/demo/recipe
holds are not trained again: about ten minutes each on one core.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper.overfit import PATCHES
from vllm_mtpc import demo
from vllm_mtpc.checkpoint.ptp_head import load_student
from vllm_mtpc.cli import main
from vllm_mtpc.engine.provenance import ROOT
from vllm_mtpc.eval.ptp_evaluator import DraftedWindows, collect, summarise
from vllm_mtpc.eval.text import Samples, Sampling, generate
from vllm_mtpc.hf import Target, load_target

DATA = ROOT / "build" / "demo"
STEPS, TEXTS, NEW_TOKENS, DRAFTS = 600, 96, 96, 7
RECIPE = {
    "head": "ptp", "window": DRAFTS + 1, "windows-per-step": 64, "seq-len": 160, "block-rows": 256,
    "learning-rate": 0.003, "evaluation-sequences": 0,
}  # fmt: skip
LARGE, LONG = {"lora-rank": 64, "lora-alpha": 64}, {"max-steps": 3 * STEPS}
INDEPENDENT = {"variant": "independent"}
# name -> options, the row it is compared with, and a patch of the order in which u passes the tokens
CASES: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "independent": (INDEPENDENT, "independent", None),
    "o-ptp": ({}, "independent", None),
    "o-ptp, the likeliest token's interval first": ({}, "independent", "likeliest first"),
    "independent, rank 64, x 3": (INDEPENDENT | LARGE | LONG, "independent, rank 64, x 3", None),
    "o-ptp, rank 64, x 3": (LARGE | LONG, "independent, rank 64, x 3", None),
}


def measure() -> Iterator[dict[str, Any]]:
    """Yield the row of each head; `gain`: tokens/step over those of the row it is compared with, by texts in pairs."""
    torch.set_num_threads(1)
    target, kept = load_target(demo.path("target"), torch.float32), dict[str, DraftedWindows]()
    lines = (DATA / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [torch.tensor(json.loads(line)["prompt_ids"]) for line in lines]
    more = {"overhang": DRAFTS + 2, "stops": set()}
    samples = generate(target, prompts[:TEXTS], NEW_TOKENS, Sampling(), torch.Generator().manual_seed(5), **more)
    for name, (options, other, patch) in CASES.items():
        with contextlib.ExitStack() as stack:
            for one in PATCHES[patch]() if patch else ():
                stack.enter_context(one)
            kept[name] = drafted(name, options, target, samples)
        found = summarise(kept[name])
        gain, error = ratio(kept[name], kept[other])
        yield {
            "what": name, "variant": options.get("variant", "o-ptp"), "tokens_per_step": found.tokens_per_step,
            "standard_error": found.standard_error, "right": found.anywhere - 1,
            "shuffled": found.shuffled_tokens_per_step, "gain": gain, "gain_error": error,
        }  # fmt: skip


def drafted(name: str, options: dict[str, Any], target: Target, samples: Samples) -> DraftedWindows:
    """Train a head where there is none, and draft for the held-out texts."""
    place = DATA / "recipe" / name.replace(",", "").replace("'", "").replace(" ", "-")
    if not (place / "config.json").exists():
        given = RECIPE | {
            "max-steps": STEPS,
            "target": demo.path("target"),
            "data": DATA / "sampled.jsonl",
            "out": place,
        }
        main(["train", *(word for key, value in (given | options).items() for word in (f"--{key}", str(value)))])
    return collect(load_student(place, target), samples, Sampling(), DRAFTS)


def ratio(ours: DraftedWindows, theirs: DraftedWindows, draws: int = 2000) -> tuple[float, float]:
    """Return the ratio of tokens/step, and its standard error over texts (bootstrap of pairs)."""
    both = [per_text(one) for one in (ours, theirs)]
    chosen = torch.randint(len(both[0]), (draws, len(both[0])), generator=torch.Generator().manual_seed(0))
    (mean, other), (drawn, others) = zip(*((rate(one), rate(one[chosen])) for one in both), strict=True)
    return (mean / other).item(), (drawn / others).std().item()


def per_text(windows: DraftedWindows) -> Tensor:
    """[S, 2]: tokens and steps of each text."""
    starts, alive = windows.steps()
    return torch.stack([(starts * (1 + alive.sum(-1))).sum(1), starts.double().sum(1)], -1).double()


def rate(counts: Tensor) -> Tensor:
    """Tokens per step of [..., S, 2]."""
    tokens, steps = counts.sum(-2).unbind(-1)
    return tokens / steps
