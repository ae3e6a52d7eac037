"""The packaged demo: a small byte-level target and one trained head per circuit."""

from pathlib import Path

NAMES = ("target", "ff", "cp", "hmm", "btree")
HEADS = NAMES[1:]


def path(name: str) -> Path:
    """Folder of a packaged asset: ``"target"`` or the circuit of a head."""
    if name not in NAMES:
        raise ValueError(f"demo asset {name!r} does not exist: use one of {', '.join(NAMES)}")
    return Path(__file__).resolve().parent / "assets" / name
