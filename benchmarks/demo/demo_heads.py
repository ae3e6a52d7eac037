"""All heads of the byte-level target: the packaged ones, and the others, which tests and benchmarks use."""

from __future__ import annotations

from pathlib import Path

from vllm_mtpc import demo

CIRCUITS = ("ff", "cp", "hmm", "btree")
BACKBONE = "backbone"
PTP = ("o-ptp", "c-ptp", "late")
NAMES = (*CIRCUITS, BACKBONE, *PTP)
ASSETS = Path(__file__).resolve().parents[2] / "tests" / "assets"


def path(name: str) -> Path:
    """Return the folder of the target or of a head of it."""
    return ASSETS / name if name in NAMES and name not in demo.NAMES else demo.path(name)
