"""Draws the figures of three pages into docs/figures: python scripts/site_figures.py [FOLDER]

Circuits are drawn from the latents that their classes declare, acceptance from the cards of the packaged heads; the
other two are sketches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from benchmarks.demo import demo_heads
from vllm_mtpc.circuits import CIRCUITS, get_circuit

WINDOW, COMPONENTS = 8, 4
INK, TARGET, DRAFT, REFUSED, LATENT = "#333333", "#3f51b5", "#81c784", "#e57373", "#ffe082"
HEADS = ("ff", "cp", "hmm", "btree")
TARGET_P, DRAFT_Q = [0.45, 0.25, 0.15, 0.10, 0.05], [0.30, 0.15, 0.35, 0.10, 0.10]  # a sketch
OUT = Path(__file__).parents[1] / "docs" / "figures"


def cell(axes: Axes, x: float, y: float, text: str, colour: str, width: float = 0.84) -> None:
    box = FancyBboxPatch((x - width / 2, y - 0.3), width, 0.6, boxstyle="round,pad=0.02", fc=colour, ec=INK, lw=0.8)
    axes.add_patch(box)
    axes.text(x, y, text, ha="center", va="center", fontsize=10, color="white" if colour == TARGET else INK)


def blank(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    axes.set(xlim=x, ylim=y, aspect="equal")
    axes.axis("off")


def step() -> Figure:
    """Two steps of one request."""
    figure, axes = plt.subplots(figsize=(9, 3.5), layout="constrained")
    blank(axes, (-3.4, 9.6), (-0.2, 4.9))
    drafts, second = ["x₁", "d₂", "d₃", "d₄", "d₅"], ["x₁", "d₂ ✓", "d₃ ✓", "d₄ ✓", "d₅ ✓"]
    fresh = [TARGET, *[DRAFT] * 4]
    rows = (
        (4.3, "drafted", drafts, fresh, 0),
        (3.3, "verified, one pass", ["x₁", "d₂ ✓", "d₃ ✓", "d₄ ✗", "d₅"], [*fresh[:3], REFUSED, "#eeeeee"], 0),
        (1.4, "drafted", drafts, fresh, 3),
        (0.4, "verified, one pass", second, fresh, 3),
    )
    for y, label, tokens, colours, first in rows:
        axes.text(-0.7, y, label, ha="right", va="center", fontsize=10, color=INK)
        for k, (token, colour) in enumerate(zip(tokens, colours, strict=True)):
            cell(axes, first + k, y, token, colour)
    cell(axes, 3, 2.35, "x₁", TARGET)
    axes.annotate("", (3, 2.02), (3, 1.72), arrowprops={"arrowstyle": "<-", "color": INK})
    axes.text(3.65, 2.35, "the target's own token, in the place of d₄", va="center", fontsize=9.5, color=INK)
    cell(axes, 8, 0.4, "x₁", TARGET)
    axes.text(8.6, 0.4, "next", va="center", fontsize=9.5, color=INK)
    return figure


def circuits() -> Figure:
    """The tree of latents of each circuit over eight tokens, as its class declares it."""
    figure, every = plt.subplots(2, 2, figsize=(9, 4.8), layout="constrained")
    titles = {"ff": "ff: none", "cp": "cp: one", "hmm": "hmm: a chain", "btree": "btree: a tree"}
    for axes, name in zip(every.flat, HEADS, strict=True):
        draw(axes, name)
        axes.set_title(titles.get(name, name), fontsize=11, color=INK)
    return figure


def draw(axes: Axes, name: str) -> None:
    circuit = get_circuit(name, WINDOW, 1 if name == "ff" else COMPONENTS)
    parents, reads = circuit.latents

    def under(latent: int) -> list[int]:
        own = [token for token, read in enumerate(reads) if read == latent]
        return own + [token for f, parent in enumerate(parents) if parent == latent for token in under(f + 1)]

    below = {latent: under(latent) for latent in range(len(parents) + 1)}
    chain = name == "hmm"
    x = {latent: (min(k) if chain else sum(k) / len(k)) for latent, k in below.items()}
    y = {latent: 1.3 if chain else 0.9 + 0.75 * len(bin(len(k) - 1)[2:]) for latent, k in below.items()}
    if circuit.num_components > 1:
        for f, parent in enumerate(parents):
            axes.plot([x[parent], x[f + 1]], [y[parent], y[f + 1]], color=INK, lw=1, zorder=0)
        for token, latent in enumerate(reads):
            axes.plot([x[latent], token], [y[latent], 0], color=INK, lw=1, zorder=0)
        axes.scatter(list(x.values()), list(y.values()), s=260, color=LATENT, edgecolors=INK, linewidths=0.8)
    for token in range(WINDOW):
        colour = TARGET if token == 0 else DRAFT
        axes.scatter([token], [0], s=330, color=colour, edgecolors=INK, linewidths=0.8)
        axes.text(token, 0, f"{token + 1}", ha="center", va="center", color="white" if token == 0 else INK, fontsize=9)
    axes.set(xlim=(-0.7, WINDOW - 0.3), ylim=(-0.6, 3.9))
    axes.axis("off")


def overlap() -> Figure:
    """What of a draft is kept, and how far it goes with the packaged heads."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
    places = range(len(TARGET_P))
    kept = [min(pair) for pair in zip(TARGET_P, DRAFT_Q, strict=True)]
    left.bar([x - 0.2 for x in places], TARGET_P, 0.4, color=TARGET, label="target p")
    left.bar([x + 0.2 for x in places], DRAFT_Q, 0.4, color=DRAFT, label="draft q")
    left.bar(places, kept, 0.8, fill=False, edgecolor=INK, hatch="///", lw=0.8, label="min(p, q)")
    left.set(xticks=list(places), xticklabels=list("abcde"), ylabel="probability")
    left.set_title(f"kept with probability Σ min(p, q) = 1 - TV = {sum(kept):.2f}", fontsize=10)
    left.legend(frameon=False, fontsize=9)
    for name in HEADS:
        figures = json.loads((demo_heads.path(name) / "provenance.json").read_text())["figures"]["t1"]
        shares = figures["per_position"]
        label = f"{name}: {figures['tokens_per_step']:.2f} tokens/step"
        right.plot(range(2, len(shares) + 2), shares, marker="o", ms=3.5, label=label)
    right.set(xlabel="position in the window", ylabel="share of steps", ylim=(0, 0.75))
    right.set_title("accepted up to this position, demo target, T=1", fontsize=10)
    right.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def number() -> Figure:
    """How a number u picks a token, and why both sides agree if they know u."""
    figure, every = plt.subplots(2, 1, figsize=(9, 2.3), sharex=True, layout="constrained")
    rows = (("target's P", [0.40, 0.25, 0.20, 0.15]), ("drafter's P", [0.35, 0.34, 0.16, 0.15]))
    for axes, (title, shares) in zip(every, rows, strict=True):
        start = 0.0
        for token, share in zip("abcd", shares, strict=True):
            chosen = start <= 0.6 < start + share
            axes.barh(0, share, left=start, color=DRAFT if chosen else "#eeeeee", edgecolor=INK, lw=0.8)
            axes.text(start + share / 2, 0, token, ha="center", va="center", fontsize=11, color=INK)
            start += share
        axes.axvline(0.6, color=TARGET, lw=2)
        axes.set(yticks=[0], yticklabels=[title], xlim=(0, 1))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
    every[0].text(0.605, 0.5, "u = 0.60", color=TARGET, fontsize=10, va="bottom")
    every[1].set_xlabel("cumulative probability: the token in whose interval u lies is picked")
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "how-step": step,
    "how-circuits": circuits,
    "how-overlap": overlap,
    "how-u": number,
}


def main(out: Path) -> None:
    assert set(HEADS) <= set(CIRCUITS)
    plt.rcParams.update({"svg.hashsalt": "vllm_mtpc", "font.family": "DejaVu Sans", "text.color": INK})
    for name, draw_figure in FIGURES.items():
        figure = draw_figure()
        figure.savefig(out / f"{name}.svg", metadata={"Date": None}, facecolor="white")
        plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
