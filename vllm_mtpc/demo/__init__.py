"""The packaged demo: a small byte-level target, one trained MtPC head per circuit, and a PTP head of each variant."""

from pathlib import Path

CIRCUITS = ("ff", "cp", "hmm", "btree")
PTP = ("o-ptp", "c-ptp")
NAMES = ("target", *CIRCUITS, *PTP)


def path(name: str) -> Path:
    """Folder of a packaged asset: ``"target"``, the circuit of an MtPC head or the variant of a PTP head."""
    if name not in NAMES:
        raise ValueError(f"demo asset {name!r} does not exist: use one of {', '.join(NAMES)}")
    return Path(__file__).resolve().parent / "assets" / name
