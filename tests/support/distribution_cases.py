"""Distributions of whole engines against enumeration, on either model runner: what is asked, and how far the answers
are.

A target of three tokens has 729 texts of six, whose probabilities are written down. A case is one engine: a head, the
kinds of request that it is asked together, an injected fault, options. All cases are asked and counted by the same few
lines.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaForCausalLM

from tests.support import backbones
from tests.support.distributions import (
    AT_ONCE,
    MIXED,
    SETTINGS,
    asking,
    draws_by_kind,
    exact_distribution,
    noise_floor,
    of_the_first,
    total_variation,
)
from tests.support.engine import Engine, build, run
from tests.support.models import make_head, make_ptp_head, make_target, make_tokenizer, sample_target
from tests.support.requests import ALL_DRAFTS

VOCAB, LENGTH, PROMPT, WINDOW = 3, 6, [0, 1], 4
CIRCUITS = {"ff": 1, "cp": 3, "hmm": 3, "btree": 3}  # their components
HEADS = [f"{circuit}, {fit}" for circuit in CIRCUITS for fit in ("good", "bad")]
OPTIONS = {"good": {}, "bad": {}, "tokens": {"token_rank": 2}, "bad tokens": {"token_rank": 2}}
OPTIONS["loud tokens"] = {"token_rank": 2, "token_scale": 10.0}
PTP = ("o-ptp", "c-ptp", "late")
CUT = {**ALL_DRAFTS, "min_acceptance": 0.3}  # V1: drafts less likely to be of use are cut, by acceptance as observed
BATCH = 1024  # V2: chosen; a step that runs all instances of a launch at once costs about the same for fewer
PAIR = slice(1, 4)  # the tokens of two answers that are looked at together: of a step's drafts, and after


@dataclass(frozen=True)
class Case:
    """head: one of HEADS, "backbone", a variant of PTP, or none. together: requests whose answers must be independent
    (1: each is looked at by itself), and whether they are samples of one request. is_fault: the injected fault must be
    found."""

    head: str | None
    settings: tuple[str, ...] = MIXED
    injected: str | None = None
    is_fault: bool = False
    together: int = 1
    is_one_request: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    runner: str = "v2 at once"
    other: str | None = None  # a second head, for an injected change that wants one


def _cases() -> dict[str, Case]:
    one, three, ptp = ("T=1",), ("T=1", "T=1.3, top-p 0.8", "bad words"), ("T=1", "T=0.7", "T=0.7, top-p 0.9")
    cases = {f"13 kinds, {head}": Case(head) for head in HEADS}
    cases |= {
        "fault: scored at another temperature": Case("btree, good", one, "other temperature", True),
        "fault: a cut that looks at the drawn token": Case("btree, good", one, "drawn cut", True),
        "fault: drafting stream = sampling stream": Case("btree, bad", one, "one stream", True),
        "fault: the recovered token is dropped": Case("btree, good", one, "drop_recovered_v2", True),
        "coupled": Case("btree, good", three, options={"verify": "coupled"}),
        "fault: coupled, noise of the first row": Case(
            "btree, good", one, "noise of the first row", True, options={"verify": "coupled"}
        ),
        "pairs of concurrent requests": Case("btree, good", one, together=2),
        "pairs of siblings, n=4": Case("btree, good", ("seeded",), together=2, is_one_request=True),
        "3, 1, 0, 2 drafts in turns": Case("btree, good", three, "switching"),
        "o-ptp": Case("o-ptp", ptp),
        "c-ptp": Case("c-ptp", ptp),
        "late": Case("late", ptp),
        "fault: o-ptp, u squared": Case("o-ptp", one, "squared_u", True),
        "ptp's sampler without drafts": Case(None, injected="coupled_without_drafts"),
        "block verification": Case("btree, good", three, options={"rejection_sample_method": "block"}),
        "no head": Case(None),
        "leaves look at the token before": Case("btree, bad tokens", three),
        "fault: drafts scored without the token before": Case("hmm, loud tokens", one, "scored without tokens", True),
        "head in bfloat16": Case("btree, good", ("T=0.7",), options={"head_dtype": "bfloat16"}),
        "backbone": Case("backbone", three),
        "another head at every step": Case("btree, good", three, "swapping", other="hmm, bad"),
    }
    cases |= {f"V1: 13 kinds, {head}": Case(head, options=CUT, runner="v1") for head in HEADS if "good" in head}
    cases["V1: leaves look at the token before"] = Case("hmm, tokens", three, options=CUT, runner="v1")
    cases["V1: another head at every step"] = Case(
        "btree, good", three, "swapping", options=CUT, runner="v1", other="hmm, bad"
    )
    cases["V1: fault: the recovered token is dropped"] = Case("btree, good", one, "drop_recovered", True, runner="v1")
    return cases


CASES = _cases()


@dataclass(frozen=True)
class Row:
    """One kind of request: total variation, and the largest that exact draws show by chance."""

    setting: str
    draws: int
    distance: float
    floor: float

    @property
    def is_kept(self) -> bool:
        return self.distance <= self.floor


def make_models(folder: Path) -> LlamaForCausalLM:
    """The target; its heads are made when a case needs them."""
    target = make_target(folder / "target", VOCAB, seed=1, hidden_size=32)
    make_tokenizer(folder / "target", VOCAB)
    return target


def _make(folder: Path, target: LlamaForCausalLM, head: str) -> None:
    if (folder / head).exists():
        return
    if head in PTP:
        make_ptp_head(folder / head, target, head, WINDOW)
        return
    if head == "backbone":
        backbones.fit(folder / head, folder / "target", sample_target(target, 32, 12, 0).tolist(), WINDOW)
        return
    circuit, fit = head.split(", ")
    make_head(folder / head, target, circuit, WINDOW, CIRCUITS[circuit], is_bad="bad" in fit, **OPTIONS[fit])


def engine(folder: Path, target: LlamaForCausalLM, case: Case, count: int, length: int) -> Engine:
    """Asks `count` answers of `length` tokens of each kind."""
    kinds = [{**SETTINGS[name].sampling(), "max_tokens": length} for name in case.settings]
    for head in filter(None, (case.head, case.other)):
        _make(folder, target, head)
    # rows for every request of a batch: by default so large a one drafts nothing
    ptp = {"method": "ptp", "draft_pass": "merged", "max_aux_rows": 4 * BATCH}
    spec = {**(ptp if case.head in PTP else ALL_DRAFTS), **case.options}
    arguments = {"max_model_len": 32, "block_size": 32, "max_num_seqs": BATCH, "kv_cache_memory_bytes": 1 << 28}
    calls = [asking(PROMPT, kinds, count, _at_once(case))]
    return build(folder, case.head, calls, case.injected, spec, max_num_batched_tokens=BATCH * WINDOW, **arguments)


def _at_once(case: Case) -> int:
    return AT_ONCE if case.together == 1 else 4 if case.is_one_request else 1


@dataclass(frozen=True)
class Measured:
    """rows: by kind of request. acceptance: drafts accepted, by those made; None without drafts."""

    name: str
    case: Case
    rows: list[Row]
    acceptance: float | None
    seconds: float

    def verdict(self, row: Row) -> str:
        """A distribution is kept or broken, a fault is found or missed."""
        return ("missed" if row.is_kept else "found") if self.case.is_fault else ("kept" if row.is_kept else "broken")

    def check(self) -> None:
        for row in self.rows:
            print(f"{self.name}: {row}: {self.verdict(row)}")
        assert self.acceptance or not self.case.head, "no draft was accepted: the head is not tested"
        wrong = [row for row in self.rows if row.is_kept == self.case.is_fault]
        assert not wrong, wrong

    def as_json(self) -> dict[str, Any]:
        rows = [{**vars(row), "verdict": self.verdict(row)} for row in self.rows]
        return {"case": self.name, "acceptance": self.acceptance, "seconds": round(self.seconds), "rows": rows}


def measure(folder: Path, target: LlamaForCausalLM, name: str, count: int, length: int = LENGTH) -> Measured:
    """`count` answers, or pairs of them, to each kind of request of a case: their first `length` tokens.

    Raises where the engine does.
    """
    start, case = time.monotonic(), CASES[name]
    made = engine(folder, target, case, count * case.together, length if case.together == 1 else LENGTH)
    (reply,) = run({"one": made}, case.runner, async_scheduling=False, timeout=20_000)["one"]
    draws = draws_by_kind(reply, len(case.settings), _at_once(case))
    distributions = [exact_distribution(target, PROMPT, LENGTH, SETTINGS[name]) for name in case.settings]
    if case.together > 1:
        draws = [_together(texts) for texts in draws]
        distributions = [_independent(distribution) for distribution in distributions]
    else:
        draws = [[text[:length] for text in texts] for texts in draws]
        distributions = [of_the_first(distribution, length, VOCAB) for distribution in distributions]
    rows = [
        Row(kind, len(texts), total_variation(texts, distribution, VOCAB), noise_floor(distribution, len(texts)))
        for kind, texts, distribution in zip(case.settings, draws, distributions, strict=True)
    ]
    acceptance = round(reply.accepted / reply.drafted, 3) if reply.drafted else None
    return Measured(name, case, rows, acceptance, time.monotonic() - start)


def _together(texts: list[list[int]]) -> list[list[int]]:
    """Tokens of answers that ran at once, side by side; each answer is looked at once."""
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return [[*one[PAIR], *other[PAIR]] for one, other in pairs]


def _independent(distribution: np.ndarray) -> np.ndarray:
    shape = (VOCAB**PAIR.start, VOCAB ** (PAIR.stop - PAIR.start), -1)
    of_one = distribution.reshape(shape).sum(axis=(0, 2))
    return np.outer(of_one, of_one).ravel()
