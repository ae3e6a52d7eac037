"""Embeddings of the auxiliary variable u in [0, 1), which auxiliary rows carry instead of a token's embedding.

Features of u, then a linear layer or (names in -mlp) a small network. Features of the PTP paper (arXiv 2512.21323),
section 3 and appendix C.1:

    ieee         the 32 bits of u as a float32, most significant first
    scalar       u itself
    threshold    e_i = 1{u <= i / n}
    arithmetic   e_i = 1{u 2^(i-1) mod 1 <= 0.5}, the bits an arithmetic coder reads

and those of the authors' code, so that its checkpoints can be converted:

    interpolation   n learned rows, linear between the two next to u (n - 1)
    round           n learned rows, the one at floor(u n)
    sawtooth        u mod 1 / i
    quarter-cos     cos(pi i u)

u is float32 for any dtype of the weights: half precision does not separate two values of u on either side of an edge of
the target's distribution. To add an embedding, add its name to EMBEDDINGS and its features to _FEATURES.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_mtpc.errors import HeadConfigError

TABLE_SIZE = 256
MAX_FEATURES = 4096
EMBEDDING = "ieee"
EMBEDDINGS = (
    *("ieee", "scalar", "scalar-mlp", "threshold", "threshold-mlp", "arithmetic", "arithmetic-mlp"),  # of the paper
    *("interpolation", "round", "sawtooth", "quarter-cos"),
)
# Default number of features or rows; the config cannot change that of _FIXED.
_COUNTS = dict.fromkeys(EMBEDDINGS, 32) | {"scalar": 1, "scalar-mlp": 1, "interpolation": 3}
_FIXED = ("ieee", "scalar", "scalar-mlp")


class AuxEmbedding(nn.Module):
    """u -> embedding of an auxiliary row; subclasses define `embed`."""

    def embed(self, u: Tensor) -> Tensor:
        """Return [..., D] float32 of u [...] float32."""
        raise NotImplementedError

    def forward(self, u: Tensor) -> Tensor:
        """Return [..., D] of u [...], in the dtype of the weights."""
        with torch.autocast(u.device.type, enabled=False):
            return self.embed(u.float()).to(next(self.parameters()).dtype)

    def table(self) -> Tensor:
        """Return the embeddings [256, D] at the centres of 256 equal bins, for `lookup`."""
        device = next(self.parameters()).device
        return self((torch.arange(TABLE_SIZE, dtype=torch.float32, device=device) + 0.5) / TABLE_SIZE)


def lookup(table: Tensor, u: Tensor) -> Tensor:
    """Return the row [..., D] of each u [...] in `AuxEmbedding.table()`; only drafts read u rounded to bins."""
    return table[(u.float() * TABLE_SIZE).long().clamp(0, TABLE_SIZE - 1)]


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
    """Learned rows; u selects one, or interpolates between two."""

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
    return (u.view(torch.int32) >> shifts & 1).float()


def _arithmetic(u: Tensor, count: int) -> Tensor:
    shifted = u * torch.exp2(_steps(u, count) - 1)  # exact: powers of two
    return (shifted - shifted.floor() <= 0.5).float()


_FEATURES = {  # (u[..., 1] float32, n) -> [..., n]; other embeddings have learned rows
    "ieee": _ieee,
    "scalar": lambda u, count: u,
    "threshold": lambda u, count: (u <= _steps(u, count) / count).float(),
    "arithmetic": _arithmetic,
    "sawtooth": lambda u, count: torch.remainder(u, 1 / _steps(u, count)),
    "quarter-cos": lambda u, count: torch.cos(torch.pi * _steps(u, count) * u),
}


def check_embedding(name: str, features: int | None, hidden: int | None) -> None:
    """Validate the options of an embedding.

    Args:
        name: one of EMBEDDINGS.
        features: `u_features`; None: not set.
        hidden: `u_hidden`; None: not set.

    Raises:
        HeadConfigError: the name is unknown, an option is missing, out of range or of another embedding.
    """
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


def build_embedding(
    name: str, hidden_size: int, features: int | None = None, hidden: int | None = None
) -> AuxEmbedding:
    """Return an untrained embedding on the current default device and dtype.

    Args:
        name: one of EMBEDDINGS.
        hidden_size: D.
        features: `u_features`; None: the default.
        hidden: `u_hidden`; None: the default.

    Raises:
        HeadConfigError: as in `check_embedding`.
    """
    given = {key: value for key, value in (("u_features", features), ("u_hidden", hidden)) if value is not None}
    options = default_options(name, hidden_size) | given
    check_embedding(name, options.get("u_features"), options.get("u_hidden"))
    count, plain = options.get("u_features", _COUNTS[name]), name.removesuffix("-mlp")
    if plain not in _FEATURES:
        return _Rows(name == "interpolation", count, hidden_size)
    return _Features(plain, count, options.get("u_hidden"), hidden_size)
