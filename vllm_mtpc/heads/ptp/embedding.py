"""Embeddings of the auxiliary variable u in [0, 1): what an auxiliary row carries in place of a token's embedding.

Features of u, then a linear layer or (names in -mlp) a small network. Features of the PTP paper (arXiv 2512.21323),
section 3 and appendix C.1:

    ieee         the 32 bits of u as a float32, most significant first
    scalar       u itself
    threshold    e_i = 1{u <= i / n}
    arithmetic   e_i = 1{u 2^(i-1) mod 1 <= 0.5}, the bits an arithmetic coder reads

and those that the authors' code offers beside them, so that checkpoints of it can be converted:

    interpolation   n learned rows, linear between the two next to u (n - 1)
    round           n learned rows, the one at floor(u n)
    sawtooth        u mod 1 / i
    quarter-cos     cos(pi i u)

u is used in float32 whatever the dtype of the weights: in half precision two values of u on either side of an edge of
the target's distribution are one. Adding an embedding: its features and its line in _EMBEDDINGS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_mtpc.errors import HeadConfigError

__all__ = ["EMBEDDING", "EMBEDDINGS", "AuxEmbedding", "build_embedding", "check_embedding", "default_options", "lookup"]

TABLE_SIZE = 256
MAX_FEATURES = 4096


class AuxEmbedding(nn.Module):
    """u -> embedding of an auxiliary row; sub-classes say how in `embed`, in float32."""

    def embed(self, u: Tensor) -> Tensor:
        """[..., D] of float32 u[...]."""
        raise NotImplementedError

    def forward(self, u: Tensor) -> Tensor:
        """[..., D] of u[...], in the dtype of the weights."""
        with torch.autocast(u.device.type, enabled=False):
            return self.embed(u.float()).to(next(self.parameters()).dtype)

    def table(self) -> Tensor:
        """[256, D]: the embeddings at the centres of 256 equal bins, for `lookup`."""
        device = next(self.parameters()).device
        return self((torch.arange(TABLE_SIZE, dtype=torch.float32, device=device) + 0.5) / TABLE_SIZE)


def lookup(table: Tensor, u: Tensor) -> Tensor:
    """[..., D] of u[...]: the row of its bin in `AuxEmbedding.table()`; only drafts see u so rounded."""
    return table[(u.float() * TABLE_SIZE).long().clamp(0, TABLE_SIZE - 1)]


class _Features(AuxEmbedding):
    """Fixed features of u, then one linear layer, or two with a GELU between them."""

    def __init__(self, features: Callable[[Tensor, int], Tensor], count: int, hidden: int | None, size: int) -> None:
        super().__init__()
        self._features, self.count = features, count
        self.inner = None if hidden is None else nn.Linear(count, hidden)
        self.outer = nn.Linear(count if hidden is None else hidden, size)

    def embed(self, u: Tensor) -> Tensor:
        values = self._features(u, self.count)  # [..., n]
        if self.inner is not None:
            values = F.gelu(_linear(values, self.inner))
        return _linear(values, self.outer)


class _Rows(AuxEmbedding):
    """Learned rows, of which u chooses one or lies between two."""

    def __init__(self, between: bool, count: int, size: int) -> None:
        super().__init__()
        self.between, self.count = between, count
        self.rows = nn.Parameter(torch.empty(count, size))
        nn.init.normal_(self.rows)

    def embed(self, u: Tensor) -> Tensor:
        place = u * (self.count - 1 if self.between else self.count)
        first = place.long().clamp(0, self.count - 1)
        if not self.between:
            return self.rows[first].float()
        second = (first + 1).clamp(max=self.count - 1)
        return torch.lerp(self.rows[first].float(), self.rows[second].float(), (place - first)[..., None])


def _linear(values: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(values, layer.weight.float(), layer.bias.float())


def _steps(u: Tensor, count: int) -> Tensor:
    """1 to count, float32[count]."""
    return torch.arange(1, count + 1, dtype=torch.float32, device=u.device)


def _ieee(u: Tensor, count: int) -> Tensor:
    shifts = torch.arange(count - 1, -1, -1, dtype=torch.int32, device=u.device)
    return (u.view(torch.int32)[..., None] >> shifts & 1).float()


def _scalar(u: Tensor, count: int) -> Tensor:
    return u[..., None]


def _threshold(u: Tensor, count: int) -> Tensor:
    return (u[..., None] <= _steps(u, count) / count).float()


def _arithmetic(u: Tensor, count: int) -> Tensor:
    shifted = u[..., None] * torch.exp2(_steps(u, count) - 1)  # exact: powers of two
    return (shifted - shifted.floor() <= 0.5).float()


def _sawtooth(u: Tensor, count: int) -> Tensor:
    return torch.remainder(u[..., None], 1 / _steps(u, count))


def _quarter_cos(u: Tensor, count: int) -> Tensor:
    return torch.cos(torch.pi * _steps(u, count) * u[..., None])


class _Entry(NamedTuple):
    features: Callable[[Tensor, int], Tensor] | None  # None: learned rows
    count: int  # features or rows
    is_free: bool = True  # the config says how many there are
    is_mlp: bool = False


_EMBEDDINGS = {
    "ieee": _Entry(_ieee, 32, is_free=False),
    "scalar": _Entry(_scalar, 1, is_free=False),
    "scalar-mlp": _Entry(_scalar, 1, is_free=False, is_mlp=True),
    "threshold": _Entry(_threshold, 32),
    "threshold-mlp": _Entry(_threshold, 32, is_mlp=True),
    "arithmetic": _Entry(_arithmetic, 32),
    "arithmetic-mlp": _Entry(_arithmetic, 32, is_mlp=True),
    "interpolation": _Entry(None, 3),
    "round": _Entry(None, 32),
    "sawtooth": _Entry(_sawtooth, 32),
    "quarter-cos": _Entry(_quarter_cos, 32),
}
EMBEDDINGS = tuple(_EMBEDDINGS)
EMBEDDING = "ieee"


def check_embedding(name: str, features: int | None, hidden: int | None) -> None:
    """Raise HeadConfigError unless `name` is known and features and hidden (None: not given) are exactly its own."""
    if name not in _EMBEDDINGS:
        raise HeadConfigError(f"unknown u_embedding {name!r}; allowed: {', '.join(EMBEDDINGS)}; set it to one of them")
    entry = _EMBEDDINGS[name]
    example = entry.count if entry.is_free else None
    for key, value, own, shown in (
        ("u_features", features, entry.is_free, example),
        ("u_hidden", hidden, entry.is_mlp, 64),
    ):
        if value is not None and not own:
            raise HeadConfigError(f"{key}={value} is not an option of u_embedding {name!r}; remove {key}")
        if value is None and own:
            raise HeadConfigError(f"u_embedding {name!r} needs {key}; add it to the config, for example {key}={shown}")
    if entry.is_free and not 1 <= features <= MAX_FEATURES:
        raise HeadConfigError(f"u_features={features}: allowed are 1 to {MAX_FEATURES}; set u_features to that")
    if name == "interpolation" and features < 2:
        raise HeadConfigError(f"u_features={features}: u_embedding 'interpolation' needs 2 rows; set u_features to 2")


def default_options(name: str, hidden_size: int) -> dict[str, int]:
    """`u_features` and `u_hidden` of an embedding where none are named; nothing for an unknown one."""
    entry = _EMBEDDINGS.get(name)
    if entry is None:
        return {}
    return ({"u_features": entry.count} if entry.is_free else {}) | ({"u_hidden": hidden_size} if entry.is_mlp else {})


def build_embedding(
    name: str, hidden_size: int, features: int | None = None, hidden: int | None = None
) -> AuxEmbedding:
    """An untrained embedding on the current default device and dtype; options not given take their defaults."""
    defaults = default_options(name, hidden_size)
    features = defaults.get("u_features") if features is None else features
    hidden = defaults.get("u_hidden") if hidden is None else hidden
    check_embedding(name, features, hidden)
    entry = _EMBEDDINGS[name]
    count = entry.count if features is None else features
    if entry.features is None:
        return _Rows(name == "interpolation", count, hidden_size)
    return _Features(entry.features, count, hidden, hidden_size)
