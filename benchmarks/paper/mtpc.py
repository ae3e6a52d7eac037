"""Tables and figures of the MtPC paper, on the demo target: heads trained with the paper's loss, served by vLLM.

As the paper counts (Appendix F): one request at a time, temperature 1, answers that do not end by themselves, all
drafts of a window in every step. *Expected*: tokens/step by the evaluator at the end of training, the target's own
token included; the paper's mean accepted counts drafts alone, and its window has one draft more.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.offline import Measured, Setting, launched
from benchmarks.paper import heads
from benchmarks.paper.frame import Row, Table, listed
from benchmarks.paper.mtpc_figures import draw_frontier
from benchmarks.paper.mtpc_students import HMMS
from vllm_mtpc import cli, demo
from vllm_mtpc.bench.decodings import Decoding, engine_arguments, find_heads
from vllm_mtpc.data import prompts
from vllm_mtpc.train.options import TrainOptions

STEPS, CONTINUED, WINDOWS = 250, 100, 128
LOSS = {"beta": 0.0, "acceptance": 0.0, "train_first": True, "gamma": 0.9}  # the paper's: likelihood of all n tokens
CELL = Setting("T=1, c=1", 1, 1.0, 96, 8)
ALL_DRAFTS = {"num_speculative_tokens_per_batch_size": "off", "min_acceptance": 0}  # in every step, as the paper's
ROUNDS = 2
WIDTHS = (8, 16, 32, 64, 128)
LAYERS = (0, 1, 2, 4)
OF_LONG_WINDOWS = [(what, HMMS[what]) for what in ("contextual, inhomogeneous, identity", "uniform start")]
SIZE = (
    f"The demo target of 0.2 (3.7M parameters, bytes), {STEPS} steps of {WINDOWS} windows of its text, the paper's "
    "loss; served by vLLM in float32 on two CPU cores, median of two rounds of 8 answers of 96 tokens. The paper: "
    "EvaByte 6.5B, 900 steps of 2.1M tokens of Tülu 3, one L40S."
)
TRAINED = {"bits": "bits/byte", "expected": "expected", "standard_error": "± s.e."}
SERVED = {"tokens_per_step": "served", "step_ms": "ms per step", "tokens_per_second": "tok/s"}


def trained(name: str, quick: bool, kind: type[TrainOptions] = TrainOptions, **given: Any) -> tuple[Path, Any]:
    """A circuit's head, trained with the paper's loss: its folder and its provenance."""
    # states of the text are computed once for all heads; draft layers read those of an earlier layer, a few rows a step
    states = {"block_rows": 2} if "init_from" in given else {"cache": str(heads.FOLDER / "hidden")}
    sizes = {"max_steps": STEPS, "windows_per_step": WINDOWS, "learning_rate": 5e-3, "evaluation_sequences": 128}
    return heads.trained(name, quick, kind, **{**sizes, **LOSS, **states, **given})


def circuit(quick: bool, name: str, n: int, r: int) -> tuple[Path, Row]:
    """A circuit's head: its folder, and what its training says of it."""
    folder, record = trained(f"{name}-n{n}-r{r}", quick, circuit=name, window=n, components=r)
    return folder, {"n": n, "circuit": name.upper(), "r": r, **expected(record)}


def expected(record: Mapping[str, Any]) -> Row:
    """Cells of TRAINED."""
    found = record["figures"]["t1"]
    bits = found["joint_bits"] / (found.get("bytes_per_token") or 1.0)
    return {"bits": bits, "expected": found["tokens_per_step"], "standard_error": found["standard_error"]}


def served(quick: bool, folders: Sequence[tuple[Path, Row]]) -> Iterator[Row]:
    """The heads next to plain vLLM, whose row comes first, each with its window's speed if all drafts were taken."""
    names = [str(folder) for folder, _ in folders]
    found = find_heads(names, {"all": ALL_DRAFTS}, on_gpu=False)
    running = [Decoding("plain"), *(one for one in found if one.name.endswith(", all"))]
    cell = replace(CELL, max_tokens=16, prompts=2) if quick else CELL
    engine = engine_arguments(str(demo.path("target")), "float32", 512, 4, False, {})
    texts = prompts.held_out(ROUNDS * cell.prompts)
    passes: list[list[Measured]] = [[] for _ in running]
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = []
        for number, one in enumerate(running):
            drafts = {} if one.is_plain else {"speculative_config": one.speculative}
            engines.append(stack.enter_context(launched({**engine, **drafts}, texts, logs / f"{number}.log")))
        for turn in range(1 if quick else ROUNDS):
            for number in list(range(len(engines)))[:: -1 if turn % 2 else 1]:
                passes[number].append(engines[number].measure(replace(cell, first=turn * cell.prompts)))
    plain = {"n": 1, "circuit": "none", "r": 1}
    for row, mine in zip([plain, *(row for _, row in folders)], passes, strict=True):
        step_ms = median(one.steps.step_ms for one in mine)
        yield {
            **row,
            "tokens_per_step": fmean(one.tokens_per_step for one in mine),
            "step_ms": step_ms,
            "draft_share": median(one.steps.draft_ms for one in mine) / step_ms,
            "tokens_per_second": median(one.tokens_per_second for one in mine),
            "speedup": median(m.tokens_per_second / p.tokens_per_second for m, p in zip(mine, passes[0], strict=True)),
            "unverified": 1000 * row["n"] / step_ms,
        }


@functools.cache
def components(quick: bool) -> Sequence[Row]:
    """Table 1."""
    widths = WIDTHS[:1] if quick else WIDTHS
    return [*served(quick, [circuit(quick, "ff", 8, 1), *(circuit(quick, "cp", 8, r) for r in widths)])]


@functools.cache
def circuits(quick: bool) -> Sequence[Row]:
    """Table 2."""
    r = 4 if quick else 32
    kinds = [(name, n, 1 if name == "ff" else r) for n in (8, 16) for name in ("ff", "hmm", "cp", "btree")]
    return [*served(quick, [circuit(quick, *kind) for kind in (kinds[:2] if quick else kinds)])]


def layers(quick: bool) -> Iterator[Row]:
    """Table 3: every head goes on from one of table 2's, with adapters of the last layers or without."""
    r = 4 if quick else 32
    for n in (8,) if quick else (8, 16):
        for name in ("ff", "btree"):
            start, _ = circuit(quick, name, n, 1 if name == "ff" else r)
            for count in LAYERS[:2] if quick else LAYERS:
                more = {"circuit": name, "window": n, "components": 1 if name == "ff" else r, "init_from": str(start)}
                more |= {"max_steps": CONTINUED, "learning_rate": 2e-3} | ({"lora_layers": count} if count else {})
                _, record = trained(f"{name}-n{n}-lora{count}", quick, **more)
                yield {"n": n, "circuit": name.upper(), "layers": count, **expected(record)}


def hmms(quick: bool) -> Iterator[Row]:
    """Appendix E."""
    r = 4 if quick else 32
    for n in (8,) if quick else (8, 16):
        yield {"n": n, "what": "cp, to compare with", **circuit(quick, "cp", n, r)[1]}
        for what, kind in HMMS.items() if n == 8 else OF_LONG_WINDOWS:
            name = f"hmm-n{n}-" + "-".join(what.replace(",", "").split())
            _, record = trained(name, quick, kind, circuit="hmm", window=n, components=r)
            yield {"n": n, "what": what, **expected(record)}


def same_texts(quick: bool) -> Iterator[Row]:
    """Expected and served tokens/step of the packaged heads on the same prompts, by `vllm-mtpc doctor`."""
    for name in ("ff",) if quick else ("ff", "cp", "hmm", "btree"):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "doctor.json")
            size = ["--prompts", "4", "--max-tokens", "16"] if quick else []
            cli.main(["doctor", str(demo.path(name)), "--json", str(file), *size])
            for one in json.loads(file.read_text(encoding="utf-8"))["comparisons"]:
                found = {key: one[key]["tokens_per_step"] for key in ("predicted", "served")}
                error = one["standard_error"]
                yield {
                    "head": name,
                    "t": one["temperature"],
                    **found,
                    "standard_error": error,
                    "steps": one["steps"]["served"],
                }


TABLES: dict[str, Table] = {
    "mtpc-table-1": Table(
        "more components",
        {"circuit": "circuit", "r": "r", **TRAINED, **SERVED, "unverified": "tok/s unverified"},
        components,
        SIZE + " Unverified: n tokens in every step.",
        "Served tokens/step, of 16 answers, fall from 64 to 128 components. Heads of 250 steps that draft in every "
        "step are slower than plain vLLM here: a pass of this target is cheap compared with the rest of a step. The "
        "[demo](../docs/performance.md#demo-target) has heads trained longer.",
    ),
    "mtpc-table-2": Table(
        "circuits and windows",
        {
            "n": "n",
            "circuit": "circuit",
            "r": "r",
            **TRAINED,
            **SERVED,
            "draft_share": "drafting",
            "speedup": "speed-up",
        },
        circuits,
        SIZE + " Drafting: its share of a step.",
        "Served, of 16 answers, BTree has fewer tokens/step than CP at n = 8, and HMM at n = 16. On two cores sixteen "
        "rows cost more than they bring. The remark on speed above applies here.",
    ),
    "mtpc-table-3": Table(
        "LoRA on the last layers",
        {"n": "n", "circuit": "circuit", "layers": "LoRA layers", **TRAINED},
        listed(layers),
        f"Heads of table 2, {CONTINUED} steps more with adapters of rank 16 on the last layers of 8, or without. Heads "
        "after such layers are served by Model Runner V2, whose kernels are interpreted here: their speed means "
        "nothing. k layers are k / 8 of a pass of this target, k / 32 of EvaByte's.",
        "The paper: BTree at n = 16 gains from 6.86 to 7.58 tokens.",
    ),
    "mtpc-figure-1": Table(
        "tokens/step against the time of a step",
        {"n": "n", "circuit": "circuit", "r": "r", **SERVED},
        lambda quick: [*components(quick), *circuits(quick)[1:]],
        "Rows of tables 1 and 2, measured one after the other: heads of both are shown twice, and plain vLLM is that "
        "of table 1. Lines: equal tok/s.",
        "Unlike in the paper, plain vLLM has the most tok/s: a pass of this target is cheap compared with drafts.",
        draw_frontier,
    ),
    "mtpc-appendix-e": Table(
        "how an HMM is parameterised, and how it starts",
        {"n": "n", "what": "", **TRAINED},
        listed(hmms),
        f"r = 32, {STEPS} steps of {WINDOWS} windows, the demo target.",
        "",
    ),
    "mtpc-served-and-expected": Table(
        "on the same texts",
        {"head": "head", "t": "T", "predicted": "expected", "standard_error": "± s.e.", "served": "served"},
        listed(same_texts),
        "Tables 1 and 2 serve 16 answers of 96 tokens to openings of functions; their expected values are of 128 "
        "continuations of other text. Here both are of the same prompts: `vllm-mtpc doctor` of the heads packaged with "
        "0.2, 32 prompts, 128 tokens, every draft in every step.",
        "In tables 1 and 2 the texts differ, so their served and expected values are not comparable.",
    ),
    "mtpc-tables-4-to-6": Table(
        "a second device",
        {},
        None,
        "They are tables 1 to 3 on a second GPU. Here tables 1 to 3 have run on a CPU alone.",
        "",
    ),
}
