"""Claims of the MtPC paper, shown with heads of SmolLM2-135M-Instruct (`benchmarks.grid`, `bench serve`).

Cells are tokens/step by the evaluator, the target's own token included, and the difference to `mlp ff` of the same
training ± its error over the same texts and the seeds. The paper counts drafts accepted at T=1; `mlp` and `backbone`
have seen x_1, so their windows have one draft less than the paper's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.paper.findings import Claim, Difference
from benchmarks.paper.frame import Row, Table
from benchmarks.result_tables import TEXTS, by_head, gain_over_seeds, over_seeds
from benchmarks.serve_tables import content

SEEDS = ("smollm2-seeds",)
HEADS = {"steps": "steps", "head": "trunk, circuit, leaves", "seeds": "seeds", **TEXTS}
MODEL = "SmolLM2-135M-Instruct (49,152 ids), trained on text that it wrote to its own prompts, default loss, n = 6."
PAPER = "The paper: EvaByte 6.5B (320 ids), 900 steps of 2.1M tokens, its likelihood loss."
STATES = "on the trunk that `peers/ours_first.yaml` trained, 16,384 ids of drafts, differences to `hmm r=4`."
SHORT = 300  # steps of most heads
PAPERS_STEP = 0.0332 / 0.0251  # a step with an HMM of n = 8 and a plain one in the paper's table 2


def heads(name: str, *wanted: str, also: Sequence[str] = ()) -> list[Row]:
    """Return rows of a result, of `wanted` heads alone if there are some; `gains`: differences to its mlp ff."""
    steps, rows = content(name)["steps"], list[Row]()
    for head, seeds in by_head(name, also=also).items():
        if not wanted or head in wanted:
            by_text = {text: [row[text] for row in seeds] for text in TEXTS}
            gains = {text: Difference(*gain_over_seeds(some)) for text, some in by_text.items()}
            cells = {text: over_seeds(some) for text, some in by_text.items()}
            rows.append({"steps": steps, "head": head, "seeds": len(seeds), **cells, "gains": gains})
    return rows


def leads(rows: Sequence[Row], t: int, pairs: Sequence[tuple[str, str]], steps: int = SHORT) -> list[Difference]:
    """Return how much more the first head of each pair accepts than the second: own text, then Spec-Bench, at T=t."""
    gains = {row["head"]: row["gains"] for row in rows if row["steps"] == steps}
    found = []
    for text in (f"own_t{t}", f"unseen_t{t}"):
        for more, less in pairs:
            lead, base = gains[more][text], gains[less][text]
            found.append(lead if less == "mlp ff" else lead - base)  # gains are those over mlp ff, in pairs
    return found


def circuit_rows() -> list[Row]:
    ranked = ("mlp ff token_rank=64", "mlp hmm r=4 token_rank=64")
    return [
        *heads("smollm2-grid", also=SEEDS),
        *heads("smollm2-factors", *ranked, also=SEEDS),
        *heads("smollm2-circuits"),
        *heads("smollm2-more-steps"),
    ]


def circuits(rows: Sequence[Row]) -> Iterator[Claim]:
    both = [("mlp hmm r=4 token_rank=64", "mlp ff")]
    for t in (1, 0):
        for trunk, shown in (("mlp", "trunk mlp"), ("none", "no trunk")):
            pairs = [(f"{trunk} {circuit} r=4", f"{trunk} ff") for circuit in ("cp", "hmm", "btree")]
            yield Claim(f"CP, HMM and BTree accept more than FF, {shown}, T={t}", leads(rows, t, pairs))
        pairs = [(f"mlp {circuit} r=4", "mlp cp r=4") for circuit in ("hmm", "btree")]
        yield Claim(f"HMM and BTree accept more than CP, trunk mlp, T={t}", leads(rows, t, pairs))
        short, long = (leads(rows, t, both, steps) for steps in (SHORT, 1500))
        yield Claim(f"HMM with token_rank accepts more than FF, T={t}", [*short, *long])
        growth = [after - before for before, after in zip(short, long, strict=True)]
        yield Claim(f"The lead of that HMM is larger after 1,500 steps than after {SHORT}, T={t}", growth)


def states(rows: Sequence[Row]) -> Iterator[Claim]:
    steps = rows[0]["steps"]
    for t in (1, 0):
        more = [(f"hmm r={r}", "hmm r=4") for r in (16, 32)]
        yield Claim(f"An HMM with r = 16 and 32 accepts more than with r = 4, T={t}", leads(rows, t, more, steps))
        over_ff = [(f"hmm r={r}", "ff") for r in (4, 16)]
        yield Claim(f"HMM with r = 4 and 16 accepts more than FF, T={t}", leads(rows, t, over_ff, steps))


def windows(rows: Sequence[Row]) -> Iterator[Claim]:
    steps = rows[-1]["steps"]
    for t in (1, 0):
        yield Claim(f"FF with n = 8 accepts more than with n = 6, T={t}", leads(rows, t, [("mlp ff n=8", "mlp ff")]))
        longer = [("ff n=16", "ff"), ("hmm r=4 n=16", "hmm r=4")]
        yield Claim(f"FF and HMM with n = 16 accept more than with n = 8, T={t}", leads(rows, t, longer, steps))


def adapters(rows: Sequence[Row]) -> Iterator[Claim]:
    for t in (1, 0):
        found = leads(rows, t, [("lora hmm r=4", "lora ff")], rows[0]["steps"])
        yield Claim(f"The HMM accepts more than FF on adapted layers, T={t}", found)


def served() -> list[Row]:
    found = content("serve-smollm2-cpu")["rows"]
    plain = {row["setting"]: row["tokens_per_second"] for row in found if row["decoding"] == "plain"}
    rows = list[dict[str, Any]]()
    for row in found:
        if row["ours"]:
            rates = {"plain": f"{plain[row['setting']]:.1f}", "rate": f"{row['tokens_per_second']:.1f}"}
            spread = "{:.2f}x [{:.2f}, {:.2f}]".format(row["speedup"], *row["speedup_spread"])
            keys = ("setting", "tokens_per_step", "speedups")
            rows.append({key: row[key] for key in keys} | rates | {"speedup": spread})
    return rows


def faster(rows: Sequence[Row]) -> Iterator[Claim]:
    for row in rows:
        by_round = [Difference(speedup - 1, None) for speedup in row["speedups"]]
        yield Claim(f"The head is faster than plain vLLM in each round, {row['setting']}", by_round)


def steps() -> list[Row]:
    """Return the steps of one client."""
    rows = [row for row in content("smollm2-step")["rows"] if row["clients"] == 1]
    shown = "{1:.2f}x [{0:.2f}, {2:.2f}]"
    return [row | {"of_plain": shown.format(*row["ratio"])} for row in rows]


def cheap(rows: Sequence[Row]) -> Iterator[Claim]:
    for row in rows:
        if row["drafts"]:
            left = Difference(PAPERS_STEP - row["ratio"][1], None)
            yield Claim(f"K = {row['drafts']}: a step is at most {PAPERS_STEP:.2f}x as long, as in the paper", [left])


TABLES = [
    Table(
        "circuits accept more than fully factorised drafts (table 2)",
        f"{MODEL} {PAPER} The rows of 500 steps have less text and 16,384 ids of drafts, and count "
        "drafts by their share of the accepted length (`gamma=0.9`: as the others). `smollm2-grid.json`, "
        "`smollm2-factors.json`, `smollm2-seeds.json`, `smollm2-circuits.json`, `smollm2-more-steps.json`.",
        HEADS,
        circuit_rows,
        circuits,
        "mtpc-table-2",
        "r is 32 in the paper, and its heads have no trunk. Steps are few, and the target's vocabulary is large: a "
        "circuit on h alone must learn from x_1 what `mlp` reads.",
    ),
    Table(
        "longer windows accept more (table 2)",
        f"{MODEL} The rows without `mlp` in their name have n = 8 or the named one, {STATES} `smollm2-factors.json`, "
        "`smollm2-seeds.json`, `smollm2-states.json`. The paper's numbers are those of the table above: FF "
        "5.14 for n = 8, 5.38 for n = 16; BTree 5.97 and 6.71.",
        HEADS,
        lambda: [
            *heads("smollm2-factors", "mlp ff", "mlp ff n=8", also=SEEDS),
            *heads("smollm2-states", "ff", "ff n=16", "hmm r=4", "hmm r=4 n=16"),
        ],
        windows,
    ),
    Table(
        "more latent states accept more (table 1)",
        f"SmolLM2-135M-Instruct, n = 8, {STATES} `smollm2-states.json`.",
        HEADS,
        lambda: heads("smollm2-states"),
        states,
        "mtpc-table-1",
        "Steps are few: the circuits have 64 windows in each, and the paper's 900 steps have 2.1M tokens.",
    ),
    Table(
        "adapters on the last layers accept more (table 3)",
        f"{MODEL} `lora`: adapters on the last layer. Windows from few rows of text at a time. `smollm2-rows.json`.",
        HEADS,
        lambda: heads("smollm2-rows"),
        adapters,
        "mtpc-table-3",
        "Adapted layers against none: not measured on this model. `mlp`, which reads x_1, accepts more than `lora` and "
        "`backbone` after so few rows of text.",
    ),
    Table(
        "an HMM is contextual and inhomogeneous, and starts as the identity (appendix E)",
        "",
        published="mtpc-appendix-e",
    ),
    Table("losses (appendix G)", "All its heads have the default loss."),
    Table(
        "drafts make decoding faster (tables 1 and 2, figure 1)",
        "SmolLM2-135M-Instruct and its packaged head (hmm, n = 6, r = 4), served by vLLM in float32 on two CPU cores "
        "to questions of Spec-Bench; the plan chooses the number of drafts. Speed-up: median of three rounds, with the "
        "least and the largest. `serve-smollm2-cpu.json`. The paper's speed-ups are in the tables above, up to 5.08 "
        "for BTree with n = 16.",
        {
            "setting": "",
            "plain": "plain, tok/s",
            "rate": "head, tok/s",
            "speedup": "speed-up",
            "tokens_per_step": "tokens/step",
        },
        served,
        faster,
        remark="Tables 4 to 6, a second device: not measured.",
    ),
    Table(
        "drafts cost little of a step (tables 1 and 2)",
        "The same head with K drafts in each step, one client, one CPU core, T=0, relative to plain vLLM's step in the "
        "same round with quartiles. `smollm2-step.json`. The paper's latency: 0.0251 s plain, 0.0290 s with FF, "
        "0.0332 s with HMM, n = 8.",
        {"head": "", "drafts": "K", "step_ms": "ms per step", "draft_ms": "ms of the draft", "of_plain": "of plain"},
        steps,
        cheap,
    ),
]
