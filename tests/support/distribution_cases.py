"""Distributions of whole engines against enumeration: what is asked, and how far the answers are.

A target of three tokens has 729 texts of six, whose probabilities are written down. A case is one engine: a head, the
kinds of request that it is asked together, an injected fault, options. The table of benchmarks/RESULTS.md:

    pytest tests/e2e/test_distribution.py --distributions=benchmarks/results/distribution-v2.json
    python -m tests.support.distribution_cases --write benchmarks/RESULTS.md
"""

from __future__ import annotations

import json
import sys
import tempfile
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
    compare,
    draws_by_kind,
    exact_distribution,
    of_the_first,
    power,
)
from tests.support.engine import Engine, build, run
from tests.support.features import write_page
from tests.support.hosted import make_eagle3
from tests.support.models import make_head, make_ptp_head, make_target, sample_target
from tests.support.requests import ALL_DRAFTS
from vllm_mtpc.engine import provenance
from vllm_mtpc.heads import HOSTED

VOCAB, LENGTH, PROMPT, WINDOW = 3, 6, [0, 1], 4
BIASES = (0.02, 0.04, 0.08)
POWER = "Simulated power: how often draws of a distribution that is biased at one token are found to be of another one."
CIRCUITS = {"ff": 1, "cp": 3, "hmm": 3, "btree": 3}  # their components
HEADS = [f"{circuit}, {fit}" for circuit in CIRCUITS for fit in ("good", "bad")]
OPTIONS = {"good": {}, "bad": {}, "tokens": {"token_rank": 2}, "bad tokens": {"token_rank": 2}}
OPTIONS["loud tokens"] = {"token_rank": 2, "token_scale": 10.0}
PTP = ("o-ptp", "c-ptp", "late")
CUT = {**ALL_DRAFTS, "min_acceptance": 0.3}  # V1: drafts less likely to be of use are cut, by acceptance as observed
PLANNED = dict.fromkeys(ALL_DRAFTS)  # no options: the defaults
BATCH = 1024  # V2: chosen; a step that runs all instances of a launch at once costs about the same for fewer
PAGE = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"
KEPT = PAGE.parent / "results" / "distribution-v2.json"
BEGIN, END = "<!-- distributions: written by tests/support/distribution_cases.py -->\n", "<!-- /distributions -->\n"
PAIR = slice(1, 4)  # the tokens of two answers that are looked at together: of a step's drafts, and after


@dataclass(frozen=True)
class Case:
    """head: one of HEADS, "backbone", a variant of PTP, or none. together: requests whose answers must be independent
    (1: each is looked at by itself), and whether they are samples of one request. is_fault: the injected fault must be
    found. times: more draws, for a small fault."""

    head: str | None
    settings: tuple[str, ...] = MIXED
    injected: str | None = None
    is_fault: bool = False
    together: int = 1
    is_one_request: bool = False
    times: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    runner: str = "v2 at once"
    other: str | None = None  # a second head, for an injected change that wants one


def _cases() -> dict[str, Case]:
    one, three, ptp = ("T=1",), ("T=1", "T=1.3, top-p 0.8", "bad words"), ("T=1", "T=0.7", "T=0.7, top-p 0.9")
    asked = ("0 drafts", "1 drafts", "2 drafts", "T=1")
    cases = {f"13 kinds, {head}": Case(head) for head in HEADS}
    cases |= {
        "fault: scored at another temperature": Case("btree, good", one, "other temperature", True),
        "fault: a cut that looks at the drawn token": Case("btree, good", one, "drawn cut", True),
        "fault: drafting stream = sampling stream": Case(
            "btree, bad", ("T=1.3, top-p 0.8",), "one stream", True, times=4
        ),
        "fault: the recovered token is dropped": Case("btree, good", one, "drop_recovered_v2", True),
        "coupled": Case("btree, good", three, options={"verify": "coupled"}),
        "fault: coupled, noise of the first row": Case(
            "btree, good", one, "noise of the first row", True, options={"verify": "coupled"}
        ),
        "pairs of concurrent requests": Case("btree, good", one, together=2),
        "pairs of siblings, n=4": Case("btree, good", ("seeded",), together=2, is_one_request=True),
        "3, 1, 0, 2 drafts in turns": Case("btree, good", three, "switching"),
        "the plan changes the number of drafts": Case("btree, good", three, "changing costs", options=PLANNED),
        "each asks for its number of drafts": Case("btree, good", asked),
        "the same, block verification": Case("btree, good", asked, options={"rejection_sample_method": "block"}),
        "fault: drafts not asked for verified as forbidden": Case(
            "btree, bad", ("1 drafts",), "surplus drafts as forbidden", True
        ),
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
        "hosted on EAGLE-3": Case("hosted", three),
        "fault: hosted, the recovered token is dropped": Case("hosted", one, "drop_recovered_v2", True),
        "product on EAGLE-3": Case("product", three),
        "fault: product, the recovered token is dropped": Case("product", one, "drop_recovered_v2", True),
        "another head at every step": Case("btree, good", three, "swapping", other="hmm, bad"),
    }
    cases |= {f"V1: 13 kinds, {head}": Case(head, options=CUT, runner="v1") for head in HEADS if "good" in head}
    cases["V1: leaves look at the token before"] = Case("hmm, tokens", three, options=CUT, runner="v1")
    cases["V1: the plan changes the number of drafts"] = Case(
        "btree, good", three, "changing costs", options=PLANNED, runner="v1"
    )
    cases["V1: another head at every step"] = Case(
        "btree, good", three, "swapping", options=CUT, runner="v1", other="hmm, bad"
    )
    cases["V1: fault: the recovered token is dropped"] = Case("btree, good", one, "drop_recovered", True, runner="v1")
    return cases


CASES = _cases()


def _make(folder: Path, target: LlamaForCausalLM, head: str) -> None:
    if (folder / head).exists():
        return
    if head in PTP:
        make_ptp_head(folder / head, target, head, WINDOW)
        return
    if head == "backbone":
        backbones.fit(folder / head, folder / "target", sample_target(target, 32, 12, 0).tolist(), WINDOW)
        return
    if head in HOSTED:
        make_eagle3(folder / "eagle3", target)
        own = {"head": head, "expander_rank": 4, "component_rank": 2}
        drafter = {"method": "eagle3", "model": "../eagle3"}
        make_head(folder / head, target, "hmm", WINDOW, 3, **own, drafter=drafter)
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


def measure(folder: Path, target: LlamaForCausalLM, name: str, count: int, length: int = LENGTH) -> dict[str, Any]:
    """Measure `count` answers, or pairs of them, to each kind of request of a case: their first `length` tokens.

    Returns:
        The case, the share of drafts that were accepted (None without drafts), and a row for each kind of request: its
        total variation, the largest that exact draws show by chance, and the verdict: a distribution is kept or broken,
        a fault is found or missed.
    """
    start, case = time.monotonic(), CASES[name]
    count *= case.times
    made = engine(folder, target, case, count * case.together, length if case.together == 1 else LENGTH)
    (reply,) = run({"one": made}, case.runner, async_scheduling=False, timeout=20_000)["one"]
    draws = draws_by_kind(reply, len(case.settings), _at_once(case))
    distributions = [exact_distribution(target, PROMPT, LENGTH, SETTINGS[name]) for name in case.settings]
    if case.together > 1:  # tokens of answers that ran at once, side by side; each answer is looked at once
        pairs = [zip(texts[::2], texts[1::2], strict=True) for texts in draws]
        draws = [[[*one[PAIR], *other[PAIR]] for one, other in texts] for texts in pairs]
        distributions = [_independent(distribution) for distribution in distributions]
    else:
        draws = [[text[:length] for text in texts] for texts in draws]
        distributions = [of_the_first(distribution, length, VOCAB) for distribution in distributions]
    rows = []
    for kind, texts, exact in zip(case.settings, draws, distributions, strict=True):
        found = compare(texts, exact, VOCAB)
        is_kept = found.distance <= found.floor
        verdict = ("missed" if is_kept else "found") if case.is_fault else ("kept" if is_kept else "broken")
        rows.append({"setting": kind, "draws": len(texts), **found._asdict(), "verdict": verdict})
    acceptance = round(reply.accepted / reply.drafted, 3) if reply.drafted else None
    measured = {"case": name, "acceptance": acceptance, "seconds": round(time.monotonic() - start), "rows": rows}
    print(measured)
    assert acceptance or not case.head, "no draft was accepted: the head is not tested"
    assert {row["verdict"] for row in rows} <= {"kept", "found"}, measured
    return measured


def keep(measured: dict[str, Any], file: Path) -> None:
    """Write it to `file`, in the place of what was measured of the case before."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"cases": {}}
    kept["cases"][measured["case"]] = {**measured, **provenance.collect("tests")}
    file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _independent(distribution: np.ndarray) -> np.ndarray:
    shape = (VOCAB**PAIR.start, VOCAB ** (PAIR.stop - PAIR.start), -1)
    of_one = distribution.reshape(shape).sum(axis=(0, 2))
    return np.outer(of_one, of_one).ravel()


def table() -> str:
    """One line for each case of V2, of the request whose distance is largest by its floor (of a fault: smallest)."""
    lines = ["| setting | drafts accepted | kinds x draws | TV | floor | of | verdict |", "|---" * 7 + "|"]
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    for name in (name for name, case in CASES.items() if case.runner != "v1"):
        case = kept["cases"].get(name)
        if case is None:
            lines.append(f"| {name} | | | | | | not run yet |")
            continue
        by_share = sorted(case["rows"], key=lambda row: row["distance"] / row["floor"] if row["floor"] else 0)
        row = by_share[0 if name.startswith("fault") else -1]
        verdicts = ", ".join(sorted({row["verdict"] for row in case["rows"]}))
        accepted = "" if case["acceptance"] is None else f"{case['acceptance']:.0%}"
        asked, found = f"{len(case['rows'])} x {row['draws']:,}", f"{row['distance']:.4f} | {row['floor']:.4f}"
        lines.append(f"| {name} | {accepted} | {asked} | {found} | {row['setting']} | {verdicts} |")
    return "\n".join([*lines, ""])


def power_table() -> str:
    """How often a bias of the distribution at T=1 is found, by its total variation; simulated."""
    with tempfile.TemporaryDirectory() as folder:
        target = make_target(Path(folder), VOCAB, seed=1, hidden_size=32)
        exact = exact_distribution(target, PROMPT, LENGTH, SETTINGS["T=1"])
    lines = [f"| draws | biased token | {' | '.join(f'TV {share}' for share in BIASES)} |", "|---" * 5 + "|"]
    for count in (1_000, 4_000, 20_000):
        for position in (0, 2):
            found = (f"{power(exact, VOCAB, position, share, count):.0%}" for share in BIASES)
            lines.append(f"| {count:,} | {position + 1} | {' | '.join(found)} |")
    return "\n".join([*lines, ""])


def written_power() -> str:
    """Return the simulated table of benchmarks/RESULTS.md."""
    return PAGE.read_text(encoding="utf-8").partition(f"{POWER}\n\n")[2].partition(f"\n{END}")[0]


def page(simulated: str | None = None) -> str:
    """Return the text of benchmarks/RESULTS.md with new tables; ``simulated``: that of the power."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    shown = power_table() if simulated is None else simulated
    return f"{before}{BEGIN}\n{table()}\n{POWER}\n\n{shown}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    write_page(sys.argv[1:], page)
