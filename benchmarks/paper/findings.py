"""Findings of the papers' tables, computed from their rows.

A claim names differences that should be positive. It holds if each exceeds two standard errors, does not hold if one is
below minus two, and is within noise otherwise. Rows of two seeds or more are compared by the differences of the seeds
that both have; the error is that of a bootstrap over these seeds, with the errors of the texts. Other errors are
combined as those of independent rows. Cells without a standard error are compared as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Key = Callable[..., Row]  # cells of a row -> the row
SURE = 2.0  # standard errors


class Difference(NamedTuple):
    """a - b, with its standard error; None: not measured."""

    value: float
    error: float | None

    def __sub__(self, other: Difference) -> Difference:  # type: ignore[override]
        errors = (self.error, other.error)
        error = None if None in errors else math.hypot(*(e for e in errors if e is not None))
        return Difference(self.value - other.value, error)

    def __str__(self) -> str:
        return f"{self.value:+.3f}" + ("" if self.error is None else f" ± {self.error:.3f}")


ONE, PAPERS_GAIN = Difference(1, 0), Difference(1.13, 0)  # of o-ptp over independent rows in the PTP paper


class Claim(NamedTuple):
    """A statement and the differences that it expects to be positive."""

    text: str
    differences: Sequence[Difference]

    def line(self) -> str:
        """Return the claim with its verdict."""
        return f"* {self.text}: **{self.verdict}** ({', '.join(map(str, self.differences))})."

    @property
    def verdict(self) -> str:
        if not self.differences:
            return "not measured"
        if any(one.error is None for one in self.differences):
            return "true of these rows" if all(one.value > 0 for one in self.differences) else "not true of these rows"
        scores = [one.value / (one.error or math.inf) for one in self.differences]
        if all(score > SURE for score in scores):
            return "holds"
        return "does not hold" if any(score < -SURE for score in scores) else "within noise"


def difference(a: Row, b: Row, key: str = "tokens_per_step") -> Difference:
    """Return a - b of a cell, paired by seeds if there are two or more."""
    seeds = (row.get("by_seed", {}) for row in (a, b))
    leads = [a["by_seed"][seed] - b["by_seed"][seed] for seed in set.intersection(*map(set, seeds))]
    if len(leads) > 1:
        spread = stdev(leads) / math.sqrt(len(leads))  # the bootstrap's, sqrt(n / (n - 1)) larger: seeds are few
        return Difference(fmean(leads), math.hypot(spread, a["of_texts"], b["of_texts"]))
    # of a head of MtPC, standard_error is that of the expected value
    errors = [row.get("standard_error") if key == "expected" or "expected" not in row else None for row in (a, b)]
    return Difference(a[key], errors[0]) - Difference(b[key], errors[1])


def rising(rows: Iterable[Row], key: str = "tokens_per_step") -> list[Difference]:
    """Return the difference of each row from the row before."""
    return [difference(b, a, key) for a, b in pairwise(rows)]


def above(rows: Iterable[Row], least: Row, key: str = "tokens_per_step") -> list[Difference]:
    return [difference(row, least, key) for row in rows]


def picker(rows: Sequence[Row]) -> Key:
    """Return a function from cells to the only row that has them."""

    def pick(**cells: Any) -> Row:
        (found,) = (row for row in rows if all(row.get(key) == value for key, value in cells.items()))
        return found

    return pick


def components(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    cps = [row(circuit="CP", r=r) for r in (8, 16, 32, 64, 128)]
    yield Claim("CP of 8 components accepts more than FF", [difference(cps[0], row(circuit="FF"), "expected")])
    yield Claim("Every doubling of the components accepts more", rising(cps, "expected"))
    yield Claim("128 components accept more than 8", [difference(cps[-1], cps[0], "expected")])
    yield Claim("Served: every doubling of the components accepts more", rising(cps))


def circuits(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    leads = {n: [difference(row(n=n, circuit=name), row(n=n, circuit="CP"), "expected") for name in ("HMM", "BTREE")]
             for n in (8, 16)}  # fmt: skip
    for n, lead in leads.items():
        yield Claim(f"HMM and BTree accept more than CP, n = {n}", lead)
    yield Claim("Their lead grows with the window", [long - short for short, long in zip(*leads.values(), strict=True)])
    longer = [
        difference(row(n=16, circuit=name), row(n=8, circuit=name), "expected") for name in ("FF", "HMM", "BTREE")
    ]
    yield Claim("Windows of 16 accept more than windows of 8 (FF, HMM, BTree)", longer)
    for n in (8, 16):
        more = above([row(n=n, circuit="HMM"), row(n=n, circuit="BTREE")], row(n=n, circuit="CP"))
        yield Claim(f"Served: HMM and BTree accept more than CP, n = {n}", more)


def adapters(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    for n in (8, 16):
        for name in ("FF", "BTREE"):
            some = [row(n=n, circuit=name, layers=count) for count in (0, 1, 2, 4)]
            less = [Difference(-one.value, None) for one in rising(some, "bits")]
            yield Claim(f"Every further adapted layer takes bits off, {name} n = {n}", less)
            yield Claim(
                f"Four adapted layers accept more than none, {name} n = {n}", above(some[3:], some[0], "expected")
            )


def hmms(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    usual, cp = "contextual, inhomogeneous, identity", "cp, to compare with"
    best = row(n=8, what=usual)
    for name in ("not contextual", "homogeneous"):
        yield Claim(
            f"The HMM accepts more than the one that is {name}", [difference(best, row(n=8, what=name), "expected")]
        )
    for n in (8, 16):
        yield Claim(
            f"The HMM accepts more than CP, n = {n}", [difference(row(n=n, what=usual), row(n=n, what=cp), "expected")]
        )
    uniform = [difference(row(n=n, what="uniform start"), row(n=n, what=cp), "expected") for n in (8, 16)]
    yield Claim("A uniform start ends below CP", [Difference(-one.value, one.error) for one in uniform])


def same_texts(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    for t in (0.0, 1.0):
        mine = [one for one in rows if one["t"] == t]
        left = [
            max(0.02 * one["predicted"], 3 * one["standard_error"]) - abs(one["served"] - one["predicted"])
            for one in mine
        ]
        text = f"Served is within 2 % or three standard errors of expected, T = {t:.0f}"
        yield Claim(text, [Difference(value, None) for value in left])


def from_data(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    far, teacher = row(what="independent"), row(what="autoregressive: the teacher")
    near = {**teacher, "perplexity": 1.05 * teacher["perplexity"]}
    for own in rows:
        if own["what"].startswith("C-PTP, inverse"):
            name = own["what"].partition("autoregressive: ")[2] or "LoRA on the frozen target"
            yield Claim(f"From data, {name}: below independent rows", [difference(far, own, "perplexity")])
            yield Claim(f"From data, {name}: within 5 % of the teacher", [difference(near, own, "perplexity")])


def against_independent(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    baselines = [one for one in rows if one["variant"] == "independent"]
    for variant in ("o-ptp", "c-ptp"):
        for other in baselines:
            lead = difference(row(what=other["what"], variant=variant), other)
            yield Claim(f"{variant} accepts more than independent rows, {other['what']}", [lead])
        deep = [one for one in rows if one["variant"] == variant and one["what"].endswith("4 layers")]
        if deep:
            lead = difference(deep[0], row(what="language taxi", variant=variant))
            yield Claim(f"{variant} accepts more with a teacher of 4 layers than of 2", [lead])


def tasks(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    for more, less in (("btree", "ff"), ("o-ptp", "ff"), ("late", "btree")):
        both = [[Difference(one[name], one.get(f"{name}_error")) for name in (more, less)] for one in rows]
        yield Claim(f"{more} accepts more than {less} in every task", [a - b for a, b in both])


def losses(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    yield Claim("Every loss and text accepts more than independent rows", above(rows[:-1], row(variant="independent")))
    of_teacher = {one["loss"]: one for one in rows[:-1] if one["text"] == "teacher"}
    for more, less in (("bce", "ce"), ("reverse-kl", "kl")):
        if more in of_teacher:
            lead = difference(of_teacher[more], of_teacher[less])
            yield Claim(f"{more} accepts more than {less}, as in the paper", [lead])
    for one in rows[:-1]:
        if one["text"] != "teacher":
            lead = difference(of_teacher[one["loss"]], one)
            yield Claim(f"The teacher's text is better than that of the {one['text']}, {one['loss']}", [lead])


def embeddings(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    for variant in ("o-ptp", "c-ptp"):
        named = {one["embedding"]: one for one in rows if one["variant"] == variant}
        for name, text in (("scalar", "A float alone accepts least"), ("threshold", "Thresholds accept most")):
            others = [one for other, one in named.items() if other != name]
            if name in named and others:
                pairs = [(one, named[name]) if name == "scalar" else (named[name], one) for one in others]
                yield Claim(f"{text}, {variant}", [difference(*pair) for pair in pairs])


def betas(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    for variant in ("o-ptp", "c-ptp"):
        leads = [difference(row(b=1.0, variant=variant), one)
                 for one in rows if one["variant"] == variant and one["b"] != 1.0]  # fmt: skip
        if leads:
            yield Claim(f"b = 1 accepts most, {variant}", leads)


def candidates(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    yield Claim("Several candidates accept more than one", above(rows[1:], row(m=1)))
    yield Claim("Every fourfold number accepts more", rising(rows))


def lengths(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    for window, variant in dict.fromkeys((one["window"], one["variant"]) for one in rows):
        mine = [one for one in rows if (one["window"], one["variant"]) == (window, variant)]
        yield Claim(f"Every larger N accepts more, {variant}, trained with windows of {window}", rising(mine))


def pairs(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    own = row(what="o-ptp")
    gap = difference(row(what="independent"), own, "spurious")
    yield Claim("O-PTP draws fewer incompatible pairs than independent rows", [gap])
    limit = Difference(0.01 - own["spurious"], own["standard_error"])
    yield Claim("Fewer than 1 % of its pairs are incompatible, as in the paper", [limit])


def bytes_recipe(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    names = ("o-ptp", "o-ptp, rank 64", "o-ptp, rank 64, x 3", "o-ptp, the likeliest token's interval first")
    short, ranked, long, likeliest = (gain(row(what=name)) for name in names)
    yield Claim("o-ptp accepts more than independent rows", [short - ONE, ranked - ONE, long - ONE])
    yield Claim("its gain is larger with four times the rank", [ranked - short])
    yield Claim("it is larger with three times the steps", [long - ranked])
    yield Claim("it is smaller with the likeliest token's interval first", [short - likeliest])
    yield Claim("it reaches the paper's 1.13x", [long - PAPERS_GAIN])


def smollm2_recipe(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    for t in (1.0, 0.7):
        o, c = (gain(row(what=name, t=t)) for name in ("o-ptp", "c-ptp"))
        yield Claim(f"o-ptp accepts more than independent rows, T={t:g}", [o - ONE])
        yield Claim(f"c-ptp accepts more than independent rows, T={t:g}", [c - ONE])
        yield Claim(f"o-ptp reaches the paper's 1.13x, T={t:g}", [o - PAPERS_GAIN])


def gain(one: Row) -> Difference:
    """Return tokens/step over those of the compared row, measured on the same texts."""
    return Difference(one["gain"], one["gain_error"])


def recipe(rows: Sequence[Row], row: Key) -> Iterator[Claim]:
    base = row(what="as below, nothing changed")
    grown = [row(what=f"{steps} steps", variant="o-ptp") for steps in ("100", "1,000", "5,000", "20,000")]
    yield Claim(
        "O-PTP accepts more with more steps (100, 300, 1,000, 5,000, 20,000)", rising([grown[0], base, *grown[1:]])
    )
    still = [row(what=f"{steps} steps", variant="independent") for steps in ("100", "1,000", "5,000", "20,000")]
    yield Claim("Independent rows accept more with more steps", rising(still))
    ranks = [row(what=f"LoRA rank {rank}") for rank in (4, 16, 64, 256)]
    yield Claim("Every larger rank accepts more (4, 16, 64, 256)", rising(ranks))
    for name in ("all weights of the rows' layers, from the teacher's", "all weights, from scratch"):
        yield Claim(f"{name.capitalize()}: more than LoRA", [difference(row(what=name), base)])
    for name in ("length curriculum: 4, then 8", "learning rate 0.001", "learning rate 0.01"):
        yield Claim(f"{name.capitalize()}: less than the recipe", [difference(base, row(what=name))])


CLAIMS: dict[str, Callable[[Sequence[Row], Key], Iterator[Claim]]] = {
    "mtpc-table-1": components,
    "mtpc-table-2": circuits,
    "mtpc-table-3": adapters,
    "mtpc-appendix-e": hmms,
    "mtpc-served-and-expected": same_texts,
    "ptp-table-1": from_data,
    "ptp-table-2": against_independent,
    "ptp-table-3": tasks,
    "ptp-table-4": losses,
    "ptp-table-5": embeddings,
    "ptp-table-6": betas,
    "ptp-table-7": candidates,
    "ptp-table-8": lengths,
    "ptp-figure-5": pairs,
    "ptp-ingredients-bytes": bytes_recipe,
    "ptp-ingredients-smollm2": smollm2_recipe,
    "ptp-ingredients": recipe,
}


def claims(name: str, rows: Sequence[Row]) -> list[Claim]:
    """Return the claims of a table about its rows; none for a table without claims."""
    return list(CLAIMS[name](rows, picker(rows))) if name in CLAIMS else []
