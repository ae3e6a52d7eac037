"""Embeddings of the auxiliary variable u in [0, 1), which auxiliary rows carry in place of a token's embedding.

Features of u, then a linear layer or (names in -mlp) a small network. Of the PTP paper (arXiv 2512.21323), section 3
and appendix C.1:

    ieee         the 32 bits of u as a float32, most significant first
    scalar       u itself
    threshold    e_i = 1{u <= i / n}
    arithmetic   e_i = 1{u 2^(i-1) mod 1 <= 0.5}, the bits of an arithmetic coder

The default of the authors' code, so that their checkpoints can be converted:

    interpolation   n learned rows, linear between the two next to u (n - 1)

u is used in float32 for weights of any dtype: in half precision two values on either side of an edge are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_mtpc.errors import HeadConfigError

MAX_FEATURES = 4096
EMBEDDINGS = (
    *("ieee", "scalar", "scalar-mlp", "threshold", "threshold-mlp", "arithmetic", "arithmetic-mlp"),  # of the paper
    "interpolation",
)
# Default number of features or rows; that of _FIXED cannot be set.
_COUNTS = dict.fromkeys(EMBEDDINGS, 32) | {"scalar": 1, "scalar-mlp": 1, "interpolation": 3}
_FIXED = ("ieee", "scalar", "scalar-mlp")


class AuxEmbedding(nn.Module):
    """Embedding of u for auxiliary rows; subclasses define `embed`, in float32."""

    def embed(self, u: Tensor) -> Tensor:
        """Return the embeddings, [..., D] float32, of u [...] float32."""
        raise NotImplementedError

    def forward(self, u: Tensor) -> Tensor:
        """Return the embeddings, [..., D] in the dtype of the weights, of u [...]."""
        with torch.autocast(u.device.type, enabled=False):
            return self.embed(u.float()).to(next(self.parameters()).dtype)


class _Features(AuxEmbedding):
    """Fixed features of u, then one linear layer, or two with a GELU between them."""

    def __init__(self, name: str, count: int, hidden: int | None, size: int) -> None:
        super().__init__()
        self.name, self.count = name, count
        self.inner = None if hidden is None else nn.Linear(count, hidden)
        self.outer = nn.Linear(count if hidden is None else hidden, size)

    def embed(self, u: Tensor) -> Tensor:
        values = _FEATURES[self.name](u[..., None], self.count)  # [..., n]
        if self.inner is not None:
            values = F.gelu(_linear(values, self.inner))
        return _linear(values, self.outer)


class _Rows(AuxEmbedding):
    """Learned rows with linear interpolation between the two next to u."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.count = count
        self.rows = nn.Parameter(torch.empty(count, size))
        nn.init.normal_(self.rows)

    def embed(self, u: Tensor) -> Tensor:
        position = u * (self.count - 1)
        first = position.long().clamp(0, self.count - 1)
        second = (first + 1).clamp(max=self.count - 1)
        return torch.lerp(self.rows[first].float(), self.rows[second].float(), (position - first)[..., None])


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


_FEATURES = {  # (u [..., 1] float32, n) -> [..., n]; the other embeddings have learned rows
    "ieee": _ieee,
    "scalar": lambda u, count: u,
    "threshold": lambda u, count: (u <= torch.arange(1, count + 1, device=u.device).float() / count).float(),
    "arithmetic": _arithmetic,
}


def check_embedding(name: str, features: int | None, hidden: int | None) -> None:
    """Raise HeadConfigError unless `name` is known and has the given options; None: not given."""
    if name not in _COUNTS:
        raise HeadConfigError(f"unknown u_embedding {name!r}; allowed: {', '.join(EMBEDDINGS)}; set it to one of them")
    own = default_options(name, 64)
    for key, value in (("u_features", features), ("u_hidden", hidden)):
        if value is not None and key not in own:
            raise HeadConfigError(f"{key}={value} is not an option of u_embedding {name!r}; remove {key}")
        if value is None and key in own:
            raise HeadConfigError(
                f"u_embedding {name!r} needs {key}; add it to the config, for example {key}={own[key]}"
            )
    if features is not None and not 1 <= features <= MAX_FEATURES:
        raise HeadConfigError(f"u_features={features}: allowed are 1 to {MAX_FEATURES}; set u_features to that")
    if name == "interpolation" and features == 1:
        raise HeadConfigError(f"u_features={features}: u_embedding 'interpolation' needs 2 rows; set u_features to 2")


def default_options(name: str, hidden_size: int) -> dict[str, int]:
    """Return the default `u_features` and `u_hidden` of an embedding; empty for an unknown one."""
    options = {"u_features": _COUNTS[name]} if name in _COUNTS and name not in _FIXED else {}
    return options | ({"u_hidden": hidden_size} if name in _COUNTS and name.endswith("-mlp") else {})


def build_embedding(name: str, hidden_size: int, features: int | None, hidden: int | None) -> AuxEmbedding:
    """Return an untrained embedding on the default device and dtype; options as in `check_embedding`."""
    count, plain = features or _COUNTS[name], name.removesuffix("-mlp")
    return _Features(plain, count, hidden, hidden_size) if plain in _FEATURES else _Rows(count, hidden_size)
