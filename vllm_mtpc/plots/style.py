"""How all plots look: written as PNG and SVG, and the same numbers give the same files: no dates, fixed ids.

matplotlib is imported when a plot is drawn. Colours are Okabe and Ito's, safe for colour-blind readers; markers and
dashes differ as well, so that nothing is lost in greyscale.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mtpc.circuits import CIRCUITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 110,
    "svg.hashsalt": "vllm_mtpc",  # otherwise ids of an SVG differ from run to run
}
NO_DATES = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}


class Look(NamedTuple):
    colour: str
    marker: str
    dashes: Any


LOOKS = (
    Look("#E69F00", "^", ":"),
    Look("#009E73", "s", "-."),
    Look("#CC79A7", "D", "--"),
    Look("#0072B2", "o", "-"),
    Look("#D55E00", "v", (0, (5, 1))),
    Look("#56B4E9", "P", (0, (3, 1, 1, 1))),
    Look("#000000", "X", (0, (1, 1))),
    Look("#8C6D31", "*", (0, (7, 2))),
)
CIRCUIT_LOOKS = dict(zip(CIRCUITS, itertools.cycle(LOOKS), strict=False))
PLAIN = Look("#000000", "*", "-")  # decoding without drafts


def looks_of(names: Sequence[str]) -> dict[str, Look]:
    """A look for each name, no two the same among the first eight: that of the circuit it starts with, if unused."""
    looks: dict[str, Look] = {}
    for name in names:
        own = CIRCUIT_LOOKS.get(name.split(" ")[0])
        if own is not None and own not in looks.values():
            looks[name] = own
    others = itertools.cycle([look for look in LOOKS if look not in looks.values()])
    return {name: looks.get(name) or next(others) for name in names}


def temperature_label(key: str) -> str:
    """Title of a panel: "t1" -> "T=1 (sampling)"."""
    return "T=0 (greedy)" if key == "t0" else f"T={key.removeprefix('t')} (sampling)"


@contextmanager
def panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure and its panels, row by row, drawn without a display; whatever style the caller has set stays."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        yield figure, list(figure.subplots(rows, columns, squeeze=False, **shared).flat)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for kind, metadata in NO_DATES.items():
        file = folder / f"{name}.{kind}"
        figure.savefig(file, format=kind, metadata=metadata)
        files.append(file)
    return files
