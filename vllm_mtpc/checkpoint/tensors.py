"""What holds for every tensor of a head, in whichever of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_mtpc.errors import CheckpointError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def stored_shapes(handle: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in an open file, by name; none of them is read."""
    return {name: tuple(handle.get_slice(name).get_shape()) for name in sorted(handle.keys())}


def checked(file: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`; raises CheckpointError unless it is float and finite."""
    if tensor.dtype not in FLOATS:
        raise CheckpointError(f"{file}: tensor {name!r} is {tensor.dtype}; allowed: float16, bfloat16, float32")
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{file}: tensor {name!r} holds NaN or infinity; the head is damaged, train or copy it again"
        )
    return tensor


def check_names(file: Path, given: set[str], expected: set[str]) -> None:
    """Raise CheckpointError unless a file holds exactly the expected tensors."""
    missing, extra = sorted(expected - given), sorted(given - expected)
    if missing:
        raise CheckpointError(f"{file}: tensor(s) missing: {', '.join(missing)}; save the head again")
    if extra:
        raise CheckpointError(
            f"{file}: unknown tensor(s): {', '.join(extra)}; allowed: {', '.join(sorted(expected))}; save it again"
        )
