"""Head checkpoints: a folder of `config.json`, `model.safetensors`, `README.md` and `provenance.json`.

A PTP head has `u_embed.safetensors` and PEFT's adapter files in the place of `model.safetensors`.

The names below are imported when they are asked for, so that finding a head does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_mtpc.checkpoint.load import check_tensors, load_head, read_circuit_config, read_config
    from vllm_mtpc.checkpoint.locate import find_head, resolve_head, resolve_verifier
    from vllm_mtpc.checkpoint.ptp import PtpHead, check_ptp, load_ptp, save_ptp
    from vllm_mtpc.checkpoint.save import save_head

__all__ = [
    "PtpHead",
    "check_ptp",
    "check_tensors",
    "find_head",
    "load_head",
    "load_ptp",
    "read_circuit_config",
    "read_config",
    "resolve_head",
    "resolve_verifier",
    "save_head",
    "save_ptp",
]

_MODULES = {
    "load": ("check_tensors", "load_head", "read_circuit_config", "read_config"),
    "locate": ("find_head", "resolve_head", "resolve_verifier"),
    "ptp": ("PtpHead", "check_ptp", "load_ptp", "save_ptp"),
    "save": ("save_head",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
