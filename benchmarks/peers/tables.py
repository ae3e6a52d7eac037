"""Tables of the peers, from peers.json, for `benchmarks.numbers`; ``python -m benchmarks.peers.tables`` draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.result_tables import error_of, millions
from benchmarks.serve_tables import content, served, table

FILE, OURS = "peers", "mlp hmm"  # the row that the others are compared with
FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "peers.svg"
Row = dict[str, Any]


@cache
def rows() -> list[Row]:
    return [row for row in content(FILE)["rows"] if row["name"] != "plain"]


def counts(row: Row, t: str, task: str | None = None) -> NDArray[np.float64]:
    """Return the tokens and steps of each question, [questions, 2]."""
    kept = [one for one, of in zip(row[t], row["tasks"], strict=True) if task in (None, of)]
    return np.array(kept, dtype=np.float64)


def per_step(found: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Return tokens/step, and each question's share of its error."""
    tokens, steps = found.T
    value = float(tokens.sum() / steps.sum())
    return value, (tokens - value * steps) / steps.sum()


def shown(row: Row, t: str, task: str | None = None) -> str:
    """Format tokens/step; of others than ours with the difference to ours ± its error over the same questions."""
    (value, own), (ours, of_ours) = (per_step(counts(one, t, task)) for one in (row, by_name(OURS)))
    if row["name"] == OURS:
        return f"{value:.2f} ± {error_of(own):.2f}"
    return f"{value:.2f} ({value - ours:+.2f} ± {error_of(own - of_ours):.2f})"


def by_name(name: str) -> Row:
    (row,) = (row for row in rows() if row["name"] == name)
    return row


def summary() -> str:
    """Return a row for each decoding: size, training, tokens/step over all tasks, and milliseconds."""
    lines = []
    for row in rows():
        trained = [millions(row["parameters"]), f"{row['minutes']:.1f}"] if row["parameters"] else ["", ""]
        times = [f"{row[name]:.1f}" if name in row else "" for name in ("draft_ms", "step_ms")]
        drafts = str(row["speculative_config"].get("num_speculative_tokens", ""))
        lines.append([row["name"], drafts, *trained, shown(row, "t1"), shown(row, "t0"), *times])
    columns = ["K", "parameters", "minutes", "tokens/step, T=1", "T=0", "ms of a draft", "ms of a step"]
    return table("decoding", lines, columns)


def by_task(t: str) -> str:
    """Return tokens/step of each task."""
    columns = list(dict.fromkeys(rows()[0]["tasks"]))
    lines = [[row["name"], *(shown(row, t, task) for task in columns)] for row in rows()]
    return table(f"T={t[1:]}", lines, columns)


def rates() -> str:
    """Return tokens/step by the milliseconds of a draft at T=1, one request at a time, by task."""
    columns = list(dict.fromkeys(rows()[0]["tasks"]))
    timed = [row for row in rows() if "draft_ms" in row]
    lines = []
    for row in timed:
        values = [per_step(counts(row, "t1", task))[0] / row["draft_ms"] for task in columns]
        lines.append([row["name"], *(f"{value:.3f}" for value in values)])
    return table("tokens/step per ms of a draft", lines, columns)


def at_8b() -> str:
    """Return launches, bytes and milliseconds of a draft for one request at the sizes of Qwen3 8B, by arithmetic."""
    names = {"EAGLE-3": "EAGLE-3", "DFlash": "DFlash", "DSpark": "DSpark", OURS: "mlp hmm r=4 t=8 V=16384"}
    names["backbone, btree r=8"] = "backbone btree r=8 c=16 V=151936"
    found = {row["head"]: row for row in content("launches")["rows"] if row["batch"] == 1}
    lines = []
    for shown_name, name in names.items():
        row = found[name]
        launches, read = row["operations"] + row["triton"], row["bytes"] / 1e9
        lines.append([shown_name, str(launches), f"{read:.2f}", f"{row['ms']:.2f}"])
    return table("decoding", lines, ["launches", "GB read and written", "ms"])


def draw(file: Path = FIGURE) -> None:
    """Draw bars of tokens/step at T=1 for each task, a colour for each decoding."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns: Sequence[str] = list(dict.fromkeys(rows()[0]["tasks"]))
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panel, width = figure.subplots(), 0.85 / len(rows())
    for index, row in enumerate(rows()):
        found = [per_step(counts(row, "t1", task)) for task in columns]
        at = [place + (index - (len(rows()) - 1) / 2) * width for place in range(len(columns))]
        panel.bar(at, [one[0] for one in found], width, yerr=[error_of(one[1]) for one in found], label=row["name"])
    panel.set_xticks(range(len(columns)), [column.replace("_", "\n") for column in columns])
    panel.set(ylabel="tokens/step, T=1", ylim=(1, None))
    panel.legend(ncols=len(rows()), fontsize=8)
    with rc_context({"svg.hashsalt": "vllm_mtpc"}):  # the same file for the same rows
        figure.savefig(file, metadata={"Date": None})


BLOCKS: dict[str, Callable[[], str]] = {
    "peers": summary,
    "peers t1": partial(by_task, "t1"),
    "peers t0": partial(by_task, "t0"),
    "peers rates": rates,
    "peers served": partial(served, "serve-peers-cpu", has_steps=True, names={"hmm": OURS}),
    "peers at 8B": at_8b,
}

if __name__ == "__main__":
    draw()
