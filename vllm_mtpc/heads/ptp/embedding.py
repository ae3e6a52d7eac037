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
FIXED = {"ieee": 32, "scalar": 1}  # numbers of features that cannot be set


class AuxEmbedding(nn.Module):
    """Fixed features of u in float32, then one linear layer, or two with a GELU between them.

    Args:
        name: one of EMBEDDINGS; options as in `check_embedding`.
        size: D.
        features: of u; None: a fixed number.
        hidden: width of the hidden layer; None: one layer.
    """

    def __init__(self, name: str, size: int, features: int | None, hidden: int | None) -> None:
        super().__init__()
        self.kind = name.removesuffix("-mlp")
        self.count = FIXED.get(self.kind) or features
        self.inner = None if hidden is None else nn.Linear(self.count, hidden)
        self.outer = nn.Linear(self.count if hidden is None else hidden, size)

    def forward(self, u: Tensor) -> Tensor:
        """Return the embeddings, [..., D] in the dtype of the weights, of u [...]."""
        with torch.autocast(u.device.type, enabled=False):
            values = _FEATURES[self.kind](u.float()[..., None], self.count)  # [..., n]
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
    if name not in EMBEDDINGS:
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
    """Return the default `u_features` and `u_hidden` of an embedding that has them."""
    options = {} if name.removesuffix("-mlp") in FIXED else {"u_features": 32}
    return options | ({"u_hidden": hidden_size} if name.endswith("-mlp") else {})
