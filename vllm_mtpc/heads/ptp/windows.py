"""Attention of many short windows over the prefixes of packed rows, in one pass.

The rows of window b see the tokens of the document at (row_b, start_b) up to start_b, whose keys and values a pass over
the packed rows has left, and the window's own rows up to themselves. Windows that share a packed row share one matrix
product with its keys; no window computes a score with another. The function is one of transformers' attention
implementations, so that every layer's projections, norms and rotary positions are the model's own code.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vllm_mtpc.errors import HeadConfigError

IMPLEMENTATION = "mtpc_windows"  # our function's name among transformers' attention implementations
SHARE = "windows"  # keyword argument that reaches it: a Record or a Layout


class Prefix(NamedTuple):
    """What the target has computed of R packed rows of S tokens."""

    hidden: Tensor  # [R, S, D] after the final norm, what Target.hidden gives
    keys: list[Tensor]  # by layer, [R, G, S, d], rotated
    values: list[Tensor]  # by layer, [R, G, S, d]
    positions: Tensor  # [R, S] int64, from 0 in each document
    documents: Tensor  # [R, S] int64, -1: padding


class Record:
    """Has the target's own attention do the work, and keeps what it is given: keys and values by layer."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, eager)
        self.keys.append(key)
        self.values.append(value)
        return function(module, query, key, value, mask, **kwargs)


class Layout:
    """B windows of n rows each, laid out as G packed rows of W places; built once per pass."""

    def __init__(self, prefix: Prefix, row: Tensor, start: Tensor, length: int) -> None:
        self.prefix, self.length = prefix, length
        self.rows, group = row.unique(return_inverse=True)  # [G], [B]
        counts = torch.bincount(group, minlength=len(self.rows))
        self.width = int(counts.max())
        order = group.argsort(stable=True)
        within = torch.empty_like(group)
        within[order] = torch.arange(len(group), device=group.device) - (counts.cumsum(0) - counts)[group[order]]
        self.place = group * self.width + within  # [B], of G * W
        index = torch.arange(prefix.documents.shape[1], device=row.device)
        seen = prefix.documents[row] == prefix.documents[row, start][:, None]  # [B, S]
        hidden = torch.ones(len(self.rows) * self.width, len(index), dtype=torch.bool, device=row.device)
        hidden[self.place] = ~(seen & (index <= start[:, None]))
        self.hidden = hidden.view(len(self.rows), 1, 1, self.width, 1, -1)  # [G, 1, 1, W, 1, S]
        self.later = torch.ones(length, length, dtype=torch.bool, device=row.device).triu(1)
        self.full = len(self.rows) == len(prefix.hidden)
        self.layer = 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """query [1, H, B * n, d], key and value [1, G, B * n, d]. Returns [1, B * n, H, d]."""
        if kwargs.get("s_aux") is not None:
            raise HeadConfigError("this target has attention sinks, which PTP heads do not support; name another")
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        keys, values = self.prefix.keys[self.layer], self.prefix.values[self.layer]
        if not self.full:
            keys, values = keys[self.rows], values[self.rows]
        self.layer += 1
        own_keys, own_values = self._placed(key), self._placed(value)  # [P, g, W, n, d], P packed rows, g key heads
        packed, groups, width, length, size = own_keys.shape
        query = self._placed(query * scale).view(packed, groups, -1, width, length, size)  # [P, g, h, W, n, d]
        before = (query.flatten(2, 4) @ keys.mT).view(*query.shape[:5], -1)  # [P, g, h, W, n, S]
        own = query @ own_keys[:, :, None].mT  # [P, g, h, W, n, n]
        if cap := kwargs.get("softcap"):
            before, own = (cap * torch.tanh(scores / cap) for scores in (before, own))
        before, own = before.masked_fill(self.hidden, -torch.inf), own.masked_fill(self.later, -torch.inf)
        weights = torch.cat([before, own], -1).softmax(-1, dtype=torch.float32).to(value.dtype)
        before, own = weights.split([keys.shape[2], length], -1)
        read = (before.flatten(2, 4) @ values).view(query.shape) + own @ own_values[:, :, None]
        read = read.permute(0, 3, 4, 1, 2, 5).reshape(packed * width, length, -1, size)  # [P * W, n, H, d]
        return read[self.place].flatten(0, 1)[None], None

    def _placed(self, states: Tensor) -> Tensor:
        """[1, H, B * n, d] of the windows as [P, H, W, n, d] at their places; zeros where there is none."""
        states = states[0].unflatten(1, (-1, self.length)).transpose(0, 1)  # [B, H, n, d]
        placed = states.new_zeros(len(self.rows) * self.width, *states.shape[1:]).index_copy(0, self.place, states)
        return placed.unflatten(0, (-1, self.width)).transpose(1, 2)


def windows_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention function of transformers: what the Record or Layout of the pass does."""
    return kwargs.pop(SHARE).attend(module, query, key, value, attention_mask, **kwargs)


def register() -> None:
    """Make the function known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, windows_attention)
