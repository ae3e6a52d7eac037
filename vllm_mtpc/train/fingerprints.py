"""What tells packed rows, and targets, from others."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_mtpc.data.rows import Rows
    from vllm_mtpc.hf import Target

SAMPLED_WEIGHTS = 64  # of each parameter, in a target's fingerprint


def data_fingerprint(rows: Rows) -> str:
    """sha256 over shape and content of the rows, the same for every way they are stored."""
    digest = hashlib.sha256(json.dumps(list(rows.tokens.shape)).encode())
    for tensor, dtype in zip(rows, (torch.int32, torch.int32, torch.bool), strict=True):
        for part in tensor.split(4096):
            digest.update(part.to("cpu", dtype).contiguous().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def target_fingerprint(target: Target) -> str:
    """sha256 over the target's config and up to 64 evenly spread values of each parameter.

    The values are rounded to bfloat16, so that loading a model in another dtype leaves the fingerprint as it is.
    """
    config = target.config.to_dict()
    for key in ("transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in sorted(target.model.named_parameters()):
        values = parameter.detach().flatten()[:: max(1, parameter.numel() // SAMPLED_WEIGHTS)][:SAMPLED_WEIGHTS]
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(values.bfloat16().view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()
