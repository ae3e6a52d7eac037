"""The device a command computes on."""

from __future__ import annotations

import torch

from vllm_mtpc.errors import UsageError

ALLOWED = "allowed are auto, cpu, cuda and cuda:N"


def choose_device(name: str) -> torch.device:
    """The device of a name; `auto` is CUDA where there is one. Raises UsageError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: {ALLOWED}; type --device auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        devices = "no CUDA device" if not found else f"CUDA devices 0 to {found - 1} alone"
        raise UsageError(f"--device {name}: torch sees {devices}; type --device auto")
    return device
