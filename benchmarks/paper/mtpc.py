"""Tables and figures of the MtPC paper, on the demo target: heads trained with the paper's loss.

Tables 1 and 2 were served by vLLM as the paper counts (Appendix F): one request at a time, temperature 1, answers that
do not end by themselves, all drafts of a window in every step. On a GPU: `benchmarks/gpu/run.sh paper`. *Expected*:
tokens/step by the evaluator at the end of training, the target's own token included; the paper's mean accepted counts
drafts alone, and its window has one draft more.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import sweep
from benchmarks.paper.frame import Row, Table, listed
from benchmarks.paper.mtpc_students import HMMS
from vllm_mtpc import cli, demo
from vllm_mtpc.engine import provenance
from vllm_mtpc.errors import UsageError
from vllm_mtpc.train.options import TrainOptions, parse
from vllm_mtpc.train.run import train, with_defaults

TEXT, FOLDER = provenance.ROOT / "build" / "demo", provenance.ROOT / "build" / "paper"
TRIAL = {"max_steps": 3, "evaluation_sequences": 8}
STEPS, CONTINUED, WINDOWS = 250, 100, 128
LOSS = {"beta": 0.0, "acceptance": 0.0, "train_first": True, "gamma": 0.9}  # the paper's: likelihood of all n tokens
LAYERS = (0, 1, 2, 4)
OF_LONG_WINDOWS = [(what, HMMS[what]) for what in ("contextual, inhomogeneous, identity", "uniform start")]
SIZE = (
    f"The demo target of 0.2 (3.7M parameters, bytes), {STEPS} steps of {WINDOWS} windows of its text, the paper's "
    "loss; served by vLLM in float32 on two CPU cores, median of two rounds of 8 answers of 96 tokens. The paper: "
    "EvaByte 6.5B, 900 steps of 2.1M tokens of Tülu 3, one L40S."
)
TRAINED = {"bits": "bits/byte", "expected": "expected", "standard_error": "± s.e."}
SERVED = {"tokens_per_step": "served", "step_ms": "ms per step", "tokens_per_second": "tok/s"}


@functools.cache
def trained(
    name: str, quick: bool, kind: type[TrainOptions] = TrainOptions, **given: Any
) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the provenance of a circuit's head, trained with the paper's loss on the target's own text.

    An existing one with the same options is not trained again. kind: options whose job is another one than theirs.

    Raises:
        UsageError: the text is missing.
    """
    sampled, greedy, held_out = (TEXT / f"{file}.jsonl" for file in ("sampled", "greedy", "heldout"))
    for file in (sampled, greedy, held_out):
        if not file.is_file():
            raise UsageError(f"{file} is missing; type: scripts/train_demo.sh --only text")
    # states of the text are computed once for all heads; draft layers read those of an earlier layer, a few rows a step
    states = {"block_rows": 2} if "init_from" in given else {"cache": str(FOLDER / "hidden")}
    values = {
        "target": str(demo.path("target")),
        "data": [str(sampled), str(greedy)],
        "validation_data": [str(held_out)],
        "seq_len": 160,
        "evaluation_sequences": 128,
        "evaluation_tokens": 96,
        "max_steps": STEPS,
        "windows_per_step": WINDOWS,
        "learning_rate": 5e-3,
        **LOSS,
        **states,
        **given,
        **(TRIAL if quick else {}),
        "out": FOLDER / ("quick" if quick else "") / name,
    }
    wanted = with_defaults(parse(values, name))
    if sweep.done(wanted) is None:
        print(f"--- {name}", flush=True)
        train(kind.model_validate(wanted.model_dump(exclude_unset=True)))
    return wanted.out, json.loads((wanted.out / "provenance.json").read_text(encoding="utf-8"))


def circuit(quick: bool, name: str, n: int, r: int) -> tuple[Path, Row]:
    """A circuit's head: its folder, and what its training says of it."""
    folder, record = trained(f"{name}-n{n}-r{r}", quick, circuit=name, window=n, components=r)
    return folder, {"n": n, "circuit": name.upper(), "r": r, **expected(record)}


def expected(record: Mapping[str, Any]) -> Row:
    """Cells of TRAINED."""
    found = record["figures"]["t1"]
    bits = found["joint_bits"] / (found.get("bytes_per_token") or 1.0)
    return {"bits": bits, "expected": found["tokens_per_step"], "standard_error": found["standard_error"]}


def layers(quick: bool) -> Iterator[Row]:
    """Table 3: every head goes on from one of table 2's, with adapters of the last layers or without."""
    r = 4 if quick else 32
    for n in (8,) if quick else (8, 16):
        for name in ("ff", "btree"):
            start, _ = circuit(quick, name, n, 1 if name == "ff" else r)
            for count in LAYERS[:2] if quick else LAYERS:
                more = {"circuit": name, "window": n, "components": 1 if name == "ff" else r, "init_from": str(start)}
                more |= {"max_steps": CONTINUED, "learning_rate": 2e-3} | (
                    {"trunk": {"kind": "lora", "layers": count}} if count else {}
                )
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
        None,
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
        None,
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
        None,
        "Rows of tables 1 and 2, measured one after the other: heads of both are shown twice, and plain vLLM is that "
        "of table 1. Lines: equal tok/s.",
        "Unlike in the paper, plain vLLM has the most tok/s: a pass of this target is cheap compared with drafts.",
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
