"""Embeddings of the auxiliary variable u in [0, 1), which auxiliary rows carry in place of a token's embedding.

Features of u, then a linear layer or (names in -mlp) a small network. Of the PTP paper (arXiv 2512.21323), section 3
and appendix C.1:

    ieee         the 32 bits of u as a float32, most significant first
    scalar       u itself
    threshold    e_i = 1{u <= i / n}
    arithmetic   e_i = 1{u 2^(i-1) mod 1 <= 0.5}, the bits of an arithmetic coder

u is used in float32 for weights of any dtype: in half precision two values on either side of an edge are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_mtpc.errors import HeadConfigError

MAX_FEATURES = 4096
EMBEDDINGS = ("ieee", "scalar", "scalar-mlp", "threshold", "threshold-mlp", "arithmetic", "arithmetic-mlp")
# Default number of features; that of _FIXED cannot be set.
_COUNTS = dict.fromkeys(EMBEDDINGS, 32) | {"scalar": 1, "scalar-mlp": 1}
_FIXED = ("ieee", "scalar", "scalar-mlp")


class AuxEmbedding(nn.Module):
    """Fixed features of u in float32, then one linear layer, or two with a GELU between them."""

    def __init__(self, name: str, count: int, hidden: int | None, size: int) -> None:
        super().__init__()
        self.name, self.count = name, count
        self.inner = None if hidden is None else nn.Linear(count, hidden)
        self.outer = nn.Linear(count if hidden is None else hidden, size)

    def forward(self, u: Tensor) -> Tensor:
        """Return the embeddings, [..., D] in the dtype of the weights, of u [...]."""
        with torch.autocast(u.device.type, enabled=False):
            values = _FEATURES[self.name](u.float()[..., None], self.count)  # [..., n]
            if self.inner is not None:
                values = F.gelu(_linear(values, self.inner))
            return _linear(values, self.outer).to(self.outer.weight.dtype)


def _linear(values: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(values, layer.weight.float(), layer.bias.float())


def _ieee(u: Tensor, count: int) -> Tensor:
    shifts = torch.arange(count - 1, -1, -1, dtype=torch.int32, device=u.device)
    return (u.view(torch.int32) >> shifts & 1).float()


def _arithmetic(u: Tensor, count: int) -> Tensor:
    powers = torch.full((count,), 2.0, device=u.device)  # torch.exp2 would be compiled at run time on a GPU
    powers[0] = 1
    shifted = u * powers.cumprod(0)  # exact
    return (shifted - shifted.floor() <= 0.5).float()


_FEATURES = {  # (u [..., 1] float32, n) -> [..., n]
    "ieee": _ieee,
    "scalar": lambda u, count: u,
    "threshold": lambda u, count: (u <= torch.arange(1, count + 1, device=u.device).float() / count).float(),
    "arithmetic": _arithmetic,
}


def check_embedding(name: str, features: int | None, hidden: int | None) -> None:
    """Raise HeadConfigError unless `name` is known and has the options that are set; None: not set."""
    if name not in _COUNTS:
        raise HeadConfigError(f"unknown u_embedding {name!r}; allowed: {', '.join(EMBEDDINGS)}; set it to one of them")
    defaults = default_options(name, 64)
    for key, value in (("u_features", features), ("u_hidden", hidden)):
        if value is not None and key not in defaults:
            raise HeadConfigError(f"{key}={value} is not an option of u_embedding {name!r}; remove {key}")
        if value is None and key in defaults:
            raise HeadConfigError(f"u_embedding {name!r} needs {key}; add {key}={defaults[key]} to the config")
    if features is not None and not 1 <= features <= MAX_FEATURES:
        raise HeadConfigError(f"u_features={features}: u_embedding {name!r} has 1 to {MAX_FEATURES}; set it to that")


def default_options(name: str, hidden_size: int) -> dict[str, int]:
    """Return the default `u_features` and `u_hidden` of an embedding; empty for an unknown one."""
    options = {"u_features": _COUNTS[name]} if name in _COUNTS and name not in _FIXED else {}
    return options | ({"u_hidden": hidden_size} if name in _COUNTS and name.endswith("-mlp") else {})


def build_embedding(name: str, hidden_size: int, features: int | None, hidden: int | None) -> AuxEmbedding:
    """Return an untrained embedding on the default device and dtype; options as in `check_embedding`."""
    return AuxEmbedding(name.removesuffix("-mlp"), features or _COUNTS[name], hidden, hidden_size)
