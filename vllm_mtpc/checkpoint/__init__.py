"""Head checkpoints: a folder of `config.json`, `model.safetensors`, `README.md` and `provenance.json`.

A PTP head has `u_embed.safetensors` and PEFT's adapter files instead of `model.safetensors`. Names of this package are
imported on first use, so that finding a head does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    "load": ("check_tensors", "load_head", "read_circuit_config", "read_config"),
    "locate": ("find_head", "resolve_head", "resolve_verifier"),
    "ptp_head": ("PtpHead", "check_ptp", "load_ptp", "load_student", "save_ptp"),
    "save": ("save_head",),
}
__all__ = [name for names in _NAMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
