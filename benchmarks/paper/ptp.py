"""Claims of the PTP paper, shown with heads of SmolLM2-135M-Instruct and of the demo's target, and in the small.

*Right in a row*: drafts that are right before the first that is not, of window - 1, over all positions of held-out
text; the paper's correct tokens without the verified one. Students of `benchmarks.paper.overfit` are of a toy language.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.paper.findings import Claim, Difference
from benchmarks.paper.frame import Row, Table
from benchmarks.serve_tables import content

ONE, PAPERS_GAIN = Difference(1, 0), Difference(1.13, 0)  # of o-ptp over independent rows in the paper
GAINS = {
    "target": "target", "what": "", "temperature": "T", "right": "right in a row", "tokens_per_step": "tokens/step",
    "standard_error": "± s.e.", "gain": "of independent", "gain_error": "± s.e. (pairs)",
    "shuffled": "with other windows' u",
}  # fmt: skip
STUDENT = {"what": "what is changed", "steps": "steps", "right": "right drafts", "first": "first draft",
           "in_a_row": "right in a row"}  # fmt: skip
TOY = (
    "64 texts of a toy language after one prompt, that u alone tells apart; a target of two layers, LoRA rank 32, "
    "windows of 8, one seed, 1,500 steps; measured on the same texts. `ptp-overfit.json`, by `python -m "
    "benchmarks.paper.overfit`. The paper: taxi pick-ups, 4 layers of 1536, windows of 100, 150,000 steps, all weights."
)
SAME = "Students of the same texts (`ptp-overfit.json`)."
TARGETS = {"smollm2": "SmolLM2", "bytes": "bytes"}


def gains() -> list[Row]:
    """Return the PTP heads of both language models."""
    return [
        row | {"target": shown, "temperature": f"{row['t']:g}"}
        for name, shown in TARGETS.items()
        for row in content(f"paper-ptp-ingredients-{name}")["rows"]
    ]


def against_independent(rows: Sequence[Row]) -> Iterator[Claim]:
    found = {(row["target"], row["what"], row["t"]): Difference(row["gain"], row["gain_error"]) for row in rows}
    for t in (1.0, 0.7):
        o, c = (found["SmolLM2", variant, t] for variant in ("o-ptp", "c-ptp"))
        yield Claim(f"SmolLM2, T={t:g}: o-ptp accepts more than independent rows", [o - ONE])
        yield Claim(f"SmolLM2, T={t:g}: c-ptp accepts more than independent rows", [c - ONE])
        yield Claim(f"SmolLM2, T={t:g}: o-ptp reaches the paper's 1.13x", [o - PAPERS_GAIN])
    names = ("o-ptp", "o-ptp, rank 64", "o-ptp, rank 64, x 3", "o-ptp, the likeliest token's interval first")
    short, ranked, long, likeliest = (found["bytes", name, 1.0] for name in names)
    yield Claim("bytes: o-ptp accepts more than independent rows", [short - ONE, ranked - ONE, long - ONE])
    yield Claim("bytes: its gain is larger with four times the rank", [ranked - short])
    yield Claim("bytes: its gain is larger with three times the steps", [long - ranked])
    yield Claim("bytes: its gain is smaller with the likeliest token's interval first", [short - likeliest])
    yield Claim("bytes: it reaches the paper's 1.13x", [long - PAPERS_GAIN])


def students(*names: str) -> list[Row]:
    """Return students by what is changed."""
    rows = {row["what"]: row for row in content("ptp-overfit")["rows"]}
    return [rows[name] for name in names]


def more(rows: Sequence[Row], better: str, worse: str = "o-ptp") -> Difference:
    """Return how many drafts in a row one student has more right than another; one seed, so without an error."""
    values = {row["what"]: row["in_a_row"] for row in rows}
    return Difference(values[better] - values[worse], None)


def follow_u(rows: Sequence[Row]) -> Iterator[Claim]:
    for name in ("o-ptp", "c-ptp"):
        yield Claim(f"{name} has more right drafts in a row than independent rows", [more(rows, name, "independent")])


def sizes(rows: Sequence[Row]) -> Iterator[Claim]:
    yield Claim("A larger rank has more right", [more(rows, "LoRA rank 128"), more(rows, "o-ptp", "LoRA rank 4")])
    yield Claim("All weights have more right than LoRA", [more(rows, "all weights of the rows' layers")])
    yield Claim("A deeper target has more right", [more(rows, "a target of 4 layers")])
    longer = [more(rows, "steps x 2"), more(rows, "steps x 4", "steps x 2")]
    yield Claim("More steps have more right", [*longer, more(rows, "1,000 texts, steps x 4", "1,000 texts")])


def losses(rows: Sequence[Row]) -> Iterator[Claim]:
    yield Claim("bce has more right than ce, as in the paper", [more(rows, "loss bce")])
    yield Claim("The student's text is as good as the teacher's, as in the paper", [more(rows, "text of the student")])


def embeddings(rows: Sequence[Row]) -> Iterator[Claim]:
    yield Claim("Bits of u have more right than thresholds, as in the paper", [more(rows, "u by its 32 bits")])
    yield Claim("128 thresholds have more right than 16", [more(rows, "o-ptp", "u by 16 thresholds")])
    yield Claim("1,024 thresholds have more right than 128", [more(rows, "u by 1,024 thresholds")])


TABLES = [
    Table(
        "O-PTP and C-PTP accept more than independent rows (table 2)",
        "Trained on the target's own text at T=1, windows of 8. SmolLM2-135M-Instruct, float32: LoRA rank 64, 450 "
        "steps of 32 windows of 52,000 tokens; 48 first turns of Spec-Bench, 48 tokens each. The demo's target (3.2M "
        "parameters, bytes): LoRA rank 16, 600 steps (x 3: 1,800) of 64 windows; 96 texts. Of independent: of rows of "
        "the same rank and steps. `paper-ptp-ingredients-smollm2.json`, `paper-ptp-ingredients-bytes.json`, by "
        "`benchmarks/paper/run.sh ptp-ingredients-smollm2` and `... ptp-ingredients-bytes`. The paper: TinyLlama-1.1B, "
        "rank 256, 1.3M steps.",
        GAINS,
        gains,
        against_independent,
        "ptp-table-2",
        "[PTP](../docs/ptp.md#where-training-stops) says what limits the gain. In the vocabulary's order u tells where "
        "in it a token is; with the likeliest token first it tells how likely the token is.",
    ),
    Table(
        "rows follow u (figure 5)",
        f"{TOY} Shares of incompatible pairs: not measured.",
        STUDENT,
        lambda: students("o-ptp", "c-ptp", "independent", "the likeliest token's interval first"),
        follow_u,
        "ptp-figure-5",
    ),
    Table(
        "size and length of training",
        SAME,
        STUDENT,
        lambda: students(
            "o-ptp", "LoRA rank 4", "LoRA rank 128", "all weights of the rows' layers", "a target of 4 layers",
            "learning rate x 2.5", "steps x 2", "steps x 4", "1,000 texts", "1,000 texts, steps x 4",
        ),
        sizes,
    ),
    Table(
        "losses and text hardly matter (table 4)",
        SAME,
        STUDENT,
        lambda: students("o-ptp", "loss bce", "text of the student"),
        losses,
        "ptp-table-4",
        "reverse-kl, and text of a dataset: not measured.",
    ),
    Table(
        "embeddings of u (table 5)",
        f"{SAME} `o-ptp` has 128 thresholds.",
        STUDENT,
        lambda: students("o-ptp", "u by 16 thresholds", "u by 1,024 thresholds", "u by its 32 bits"),
        embeddings,
        "ptp-table-5",
    ),
    Table("C-PTP from data alone is as good as the teacher (table 1)", "", published="ptp-table-1"),
    Table(
        "O-PTP accepts most on Spec-Bench (table 3)",
        "The first table has SmolLM2 on first turns of Spec-Bench at T=0.7, not by task.",
        published="ptp-table-3",
    ),
    Table("where u lies in its interval (table 6)", "", published="ptp-table-6"),
    Table("several candidates per step accept more (table 7)", "", published="ptp-table-7"),
    Table("shorter windows (table 8)", "", published="ptp-table-8"),
    Table(
        "smaller models that draft, autoregressive and PTP (figure 4, table 9)",
        "A separate student has its own weights, KV cache and prefill next to the target's, and vLLM's `draft_model` "
        "has random numbers of its own. Draft layers (`--trunk backbone`) use the target's cache.",
    ),
]  # fmt: skip
