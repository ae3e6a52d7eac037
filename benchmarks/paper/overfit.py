"""Where the training of PTP heads stops: ``python -m benchmarks.paper.overfit``.

Students of the language `taxi` (benchmarks/paper/toy.py) on 64 texts that all follow one prompt, and measured on these
texts. u alone tells which of them a window is: rows without u draft the likeliest token at each place, rows that follow
u draft every text to its end. *Right*: drafts after the prompt that are right; *in a row*: those before the first wrong
one. Each row changes one thing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.paper import toy
from vllm_mtpc.engine import provenance
from vllm_mtpc.eval import ptp_evaluator
from vllm_mtpc.eval.text import Sampling, generate
from vllm_mtpc.heads.ptp.distribution import edges
from vllm_mtpc.heads.ptp.layers import PtpLayers
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.report import Bar, write_json
from vllm_mtpc.train.ptp import ptp_module
from vllm_mtpc.train.ptp.ptp_trainer import PtpTrainer

FILE = provenance.RESULTS / "ptp-overfit.json"
WINDOW, STEPS, TEXTS = 8, 1500, 64


class OwnWeights(Student):
    """A student whose rows have their own layers with all weights trained, from the target's.

    They still read the keys and values that the plain target left of the text, and its norm and lm_head.
    """

    def adapt(self, view: nn.Module, rank: int, alpha: float, layers: Any = None) -> None:
        self.own = nn.ModuleList(_learning(layer) for layer in view.layers)
        view.layers = self.own


class OwnTrainer(PtpTrainer):
    student_class = OwnWeights


def _learning(layer: nn.Module) -> nn.Module:
    """Return a copy with its own weights and the attention function of Student."""
    made = copy.deepcopy(layer).requires_grad_(True)
    for old, new in zip(layer.modules(), made.modules(), strict=True):
        if hasattr(old, "config"):
            new.config = old.config
    return made


CASES: dict[str, dict[str, Any]] = {
    "o-ptp": {},
    "independent": {"variant": "independent"},
    "c-ptp": {"variant": "c-ptp"},
    "LoRA rank 4": {"lora_rank": 4, "lora_alpha": 4},
    "LoRA rank 128": {"lora_rank": 128, "lora_alpha": 128},
    "all weights of the rows' layers": {"trainer": OwnTrainer, "learning_rate": 1e-3},
    "a target of 4 layers": {"layers": 4},
    "u by 16 thresholds": {"u_features": 16},
    "u by 1,024 thresholds": {"u_features": 1024},
    "u by its 32 bits": {"patch": "bits", "u_features": 32},
    "loss bce": {"ptp_loss": "bce"},
    "text of the student": {"proposals": "student"},
    "the likeliest token's interval first": {"patch": "likeliest first"},
    "learning rate x 2.5": {"learning_rate": 1e-2},
    "steps x 2": {"steps": 2 * STEPS},
    "steps x 4": {"steps": 4 * STEPS},
    "1,000 texts": {"texts": 1000},
    "1,000 texts, steps x 4": {"texts": 1000, "steps": 4 * STEPS},
}


def texts_of(count: int, layers: int = 2, window: int = WINDOW) -> toy.Toy:
    """`count` texts of a target after one prompt, to train on and to measure."""
    language = toy.LANGUAGES["taxi"]
    target = toy.make_teacher(language, "taxi", layers)
    prompt = torch.from_numpy(language.write(1, language.prompt, 3)[0])
    more = {"overhang": window, "stops": set(), "batch": count}
    made = generate(target, [prompt] * count, window, Sampling(), torch.Generator().manual_seed(0), **more)
    texts = made.tokens[:, : language.prompt + window].numpy()
    return toy.Toy("taxi", target, [(text, np.ones(len(text), bool)) for text in texts], made)


def train(texts: toy.Toy, steps: int, window: int = WINDOW, **changes: Any) -> Student:
    """A student of these texts."""
    sizes = {"seq_len": len(texts.documents[0][0]), "block_rows": min(256, len(texts.documents))}
    return toy.train(texts, window, steps, **({"variant": "o-ptp"} | sizes | changes))


def right_drafts(texts: toy.Toy, student: Student) -> Tensor:
    """[S, K] bool: the drafts after the prompt that are right."""
    return ptp_evaluator.collect(student, texts.held_out, Sampling()).right[:, 0]


def _likeliest_first(log_probs: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """`edges` where u passes the likeliest token first, then the others in the vocabulary's order."""
    top = log_probs.argmax(-1, keepdim=True)
    moved = torch.cat([log_probs.gather(-1, top), log_probs.scatter(-1, top, -torch.inf)], -1)
    return edges(moved, torch.where(token == top[..., 0], 0, token + 1))


def _bits(self: PtpLayers, u: Tensor) -> Tensor:
    """The embedding of the bits of u as a float32, which the paper's large models have."""
    shifts = torch.arange(31, -1, -1, dtype=torch.int32)
    features = (u.float()[..., None].view(torch.int32) >> shifts & 1).float()
    return F.linear(features, self.outer.weight, self.outer.bias)


PATCHES: dict[str, Callable[[], list[Any]]] = {
    "bits": lambda: [mock.patch.object(PtpLayers, "forward", _bits)],
    "likeliest first": lambda: [
        mock.patch.object(module, "edges", _likeliest_first) for module in (ptp_module, ptp_evaluator)
    ],
}


def run(changes: dict[str, Any]) -> dict[str, Any]:
    """Train and measure one student; return its row."""
    changes, begun = {"steps": STEPS, "texts": TEXTS, "layers": 2, "patch": None} | changes, time.time()
    steps, count, layers, patch = (changes.pop(key) for key in ("steps", "texts", "layers", "patch"))
    with contextlib.ExitStack() as stack:
        for one in PATCHES[patch]() if patch else ():
            stack.enter_context(one)
        texts = texts_of(count, layers)
        right = right_drafts(texts, train(texts, steps, **changes)).double()
    row = {"steps": steps, "texts": count, "right": right.mean().item(), "first": right[:, 0].mean().item()}
    return row | {"in_a_row": right.cumprod(-1).sum(-1).mean().item(), "seconds": round(time.time() - begun)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    about, rows = provenance.collect(), []
    for name in Bar(list(CASES), desc="students", unit="student"):
        rows.append({"what": name, **run(CASES[name])})
        write_json(FILE, {"title": "PTP students on texts that follow one prompt", **about, "rows": rows})


if __name__ == "__main__":
    main()
