"""The student of a PTP head: the target with a gated LoRA, read at rows that carry u in place of a token.

Source: "Parallel Token Prediction for Language Models", arXiv 2512.21323. Real tokens run through the plain target,
auxiliary rows through copies of the layers that share the target's weights and add low-rank ones (`heads/adapters.py`).

A window at index t holds rows j = 0 .. n - 1 that carry u_(t+1+j). The position of a row is the index of the token it
predicts, less one: t + j where row j names token t + 1 + j itself (o-ptp), t + 1 + j where it gives the distribution of
the next token (c-ptp). After the final norm the rows of drafts may run through a late network
(`vllm_mtpc.heads.ptp.late`).

Many short windows are computed in one pass. The rows of window b see the tokens of the document at (row_b, start_b) up
to start_b, whose keys and values come from a pass over the packed rows, and the window's own rows up to themselves.
This is an attention function of transformers: projections, norms and rotary positions are the model's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.adapters import AdaptedLayers, layered_backbone, sharing_copy, view_of
from vllm_mtpc.heads.ptp.embedding import AuxEmbedding, build_embedding
from vllm_mtpc.heads.ptp.late import LateNetwork, build_late
from vllm_mtpc.heads.trunk.backbone import rank_in_group

UNUSED_U = 0.5  # of rows whose u is not used: greedy decoding, the independent baseline
BYTES = ("evabyte", "tpu_llama")  # summaries of older windows; embeddings made of several tokens
IMPLEMENTATION = "mtpc_windows"  # the name of `windows_attention` among transformers' attention functions


class Prefix(NamedTuple):
    """The target's states, keys and values of R packed rows of S tokens."""

    hidden: Tensor  # [R, S, D] after the final norm, as of Target.hidden
    keys: list[Tensor]  # by layer, [R, G, S, d], rotated
    values: list[Tensor]  # by layer, [R, G, S, d]
    positions: Tensor  # [R, S] int64, from 0 in each document
    documents: Tensor  # [R, S] int64, -1: padding


class PrefixReader:
    """Runs the target's own attention and stores the keys and values of each layer."""

    def __init__(self, implementation: str) -> None:
        self.implementation, self.keys, self.values = implementation, list[Tensor](), list[Tensor]()

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        """Attention function of transformers."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, eager)
        self.keys.append(key)
        self.values.append(value)
        return function(module, query, key, value, mask, **kwargs)


class WindowGrid:
    """B windows of `length` n rows each, as a grid of G packed rows of W windows; built once per pass.

    Where this would be half padding, as with few windows of many rows, each window has its own copy of its packed row.
    `start` [B] is the index of the last token of packed row `row` [B] that a window reads.
    """

    def __init__(self, prefix: Prefix, row: Tensor, start: Tensor, length: int) -> None:
        self.prefix, self.length = prefix, length
        self.rows, group = row.unique(return_inverse=True)  # [G], [B]
        rank = rank_in_group(group)
        self.width = int(rank.max()) + 1
        self.place = group * self.width + rank  # [B], of G * W
        if len(self.rows) * self.width >= 2 * len(row):
            self.rows, self.width, self.place = row, 1, torch.arange(len(row), device=row.device)
        index = torch.arange(prefix.documents.shape[1], device=row.device)
        seen = prefix.documents[row] == prefix.documents[row, start][:, None]  # [B, S]
        hidden = torch.ones(len(self.rows) * self.width, len(index), dtype=torch.bool, device=row.device)
        hidden[self.place] = ~(seen & (index <= start[:, None]))
        self.hidden = hidden.view(len(self.rows), 1, 1, self.width, 1, -1)  # [G, 1, 1, W, 1, S]
        self.later = torch.ones(length, length, dtype=torch.bool, device=row.device).triu(1)
        self.full = torch.equal(self.rows, torch.arange(len(prefix.hidden), device=row.device))
        self.layer = 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Return [1, B * n, H, d] and None for query [1, H, B * n, d], key and value [1, G, B * n, d].

        Raises:
            HeadConfigError: the target has attention sinks.
        """
        if kwargs.get("s_aux") is not None:
            raise HeadConfigError("this target has attention sinks, which PTP heads do not support; name another")
        scale = query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
        keys, values = self.prefix.keys[self.layer], self.prefix.values[self.layer]
        if not self.full:
            keys, values = keys[self.rows], values[self.rows]
        self.layer += 1
        key, value = self._placed(key), self._placed(value)  # [P, g, W, n, d], P packed rows, g key heads
        packed, groups, width, length, size = key.shape
        query = self._placed(query * scale).view(packed, groups, -1, width, length, size)  # [P, g, h, W, n, d]
        before = (query.flatten(2, 4) @ keys.mT).view(*query.shape[:5], -1)  # [P, g, h, W, n, S]
        inside = query @ key[:, :, None].mT  # [P, g, h, W, n, n]
        if cap := kwargs.get("softcap"):
            before, inside = (cap * torch.tanh(scores / cap) for scores in (before, inside))
        before, inside = before.masked_fill(self.hidden, -torch.inf), inside.masked_fill(self.later, -torch.inf)
        weights = torch.cat([before, inside], -1).softmax(-1, dtype=torch.float32).to(value.dtype)
        before, inside = weights.split([keys.shape[2], length], -1)
        read = (before.flatten(2, 4) @ values).view(query.shape) + inside @ value[:, :, None]
        read = read.permute(0, 3, 4, 1, 2, 5).reshape(packed * width, length, -1, size)  # [P * W, n, H, d]
        return read[self.place].flatten(0, 1)[None], None

    def _placed(self, states: Tensor) -> Tensor:
        """Return states [1, H, B * n, d] of the windows as [P, H, W, n, d] in the grid; padding is zero."""
        states = states[0].unflatten(1, (-1, self.length)).transpose(0, 1)  # [B, H, n, d]
        placed = states.new_zeros(len(self.rows) * self.width, *states.shape[1:]).index_copy(0, self.place, states)
        return placed.unflatten(0, (-1, self.width)).transpose(1, 2)


def windows_attention(*args: Any, windows: PrefixReader | WindowGrid, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attention function of transformers: calls the reader or grid of the pass."""
    return windows.attend(*args, **kwargs)


class Student(AdaptedLayers):
    """A PTP head on its target: adapters, embedding (at the scale of the target's) and late network, in float32.

    Args:
        target: a `vllm_mtpc.hf.Target`.
        config: the head's PtpConfig.

    Raises:
        HeadConfigError: the target has other layers than full attention.
    """

    def __init__(self, target: Any, config: Any) -> None:
        from transformers import AttentionInterface

        super().__init__(target)
        AttentionInterface.register(IMPLEMENTATION, windows_attention)
        backbone = _check_target(target)
        self.config, self.first_row = config, config.first_row  # the row of a window's first draft
        plain, adapted = (view_of(backbone, [_with_windows(layer) for layer in backbone.layers]) for _ in range(2))
        self.adapt(adapted, config.lora_rank, config.lora_alpha)
        self._plain, self._adapted = (plain,), (adapted,)  # in tuples, as the target
        self.embedding = _scaled_embedding(config, backbone).to(target.device)
        late = build_late(config.hidden_size, config.late_width)
        self.late = late and late.float().to(target.device)

    @torch.no_grad()
    def prefix(self, tokens: Tensor, documents: Tensor | None = None) -> Prefix:
        """Run the plain target over tokens [R, S]; documents [R, S] as in `Target.hidden`."""
        target = self.target
        tokens, packed = tokens.to(target.device, torch.long), target.packed(documents)
        if documents is None:
            documents = torch.zeros_like(tokens)
            positions = torch.arange(tokens.shape[1], device=target.device).expand_as(tokens)
        else:
            documents, positions = documents.to(target.device, torch.long), packed["position_ids"]
        reader = PrefixReader(target.backbone.config._attn_implementation)
        hidden = self._plain[0](input_ids=tokens, use_cache=False, windows=reader, **packed).last_hidden_state
        return Prefix(hidden, reader.keys, reader.values, positions, documents)

    def aux(self, prefix: Prefix, row: Tensor, start: Tensor, u: Tensor) -> Tensor:
        """Run the rows of windows through the adapted layers; [B, n, D] after the final norm.

        Args:
            prefix: of R packed rows.
            row: [B] int64.
            start: [B] int64, index of the last token that a window reads.
            u: [B, n] in [0, 1).
        """
        u = u.to(self.target.device, torch.float32)
        embeds = self.embedding(u if self.config.informed else torch.full_like(u, UNUSED_U))
        return self._windows(self._adapted[0], prefix, row, start, 1 - self.first_row, embeds.to(self.target.dtype))

    @torch.no_grad()
    def plain(self, prefix: Prefix, row: Tensor, start: Tensor, tokens: Tensor) -> Tensor:
        """Return the plain target's states [B, m, D] of tokens [B, m] that follow (row [B], start [B])."""
        embeds = self._token_embeddings(tokens.to(self.target.device, torch.long))
        return self._windows(self._plain[0], prefix, row, start, 1, embeds)

    def states(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return hidden [B, m, D] of `aux` after the late network, if any, given tokens [B, n], x_1 and the next."""
        if self.late is None:
            return hidden
        before, rows = hidden.tensor_split([self.first_row], 1)
        front = self._token_embeddings(tokens[:, : rows.shape[1]].clamp(min=0))
        return torch.cat([before, self.late(rows, front)], 1)

    def chain(self, hidden: Tensor, first: Tensor, choose: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Return the drafts [B, K] of the late network; arguments as in `LateNetwork.draft`."""
        assert self.late is not None
        return self.late.draft(hidden, first.to(hidden.device), self._token_embeddings, choose)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] float32 of the target's own lm_head for hidden [..., D]."""
        return self.target.logits(hidden)

    @torch.no_grad()
    def _token_embeddings(self, tokens: Tensor) -> Tensor:
        return self._plain[0].get_input_embeddings()(tokens)

    @torch.no_grad()
    def take(self, lora: Mapping[str, Tensor], embedding: AuxEmbedding, late: LateNetwork | None = None) -> None:
        """Copy adapters (by their names on disk), embedding and late network; raises as `take_lora`."""
        self.take_lora(lora)
        self.embedding.load_state_dict(embedding.state_dict())
        if late is not None and self.late is not None:
            self.late.load_state_dict(late.state_dict())

    def _windows(
        self, view: nn.Module, prefix: Prefix, row: Tensor, start: Tensor, shift: int, embeds: Tensor
    ) -> Tensor:
        count, length, _ = embeds.shape
        row, start = row.to(embeds.device), start.to(embeds.device)
        at = prefix.positions[row, start][:, None] + torch.arange(shift, shift + length, device=row.device)
        states = view(
            inputs_embeds=embeds.flatten(0, 1)[None],  # [1, B * n, D]
            position_ids=at.flatten()[None],
            # transformers passes a mask of four dimensions unchanged, and builds none
            attention_mask=embeds.new_zeros(1, 1, 1, 1),
            use_cache=False,
            windows=WindowGrid(prefix, row, start, length),
        ).last_hidden_state
        return states.view(count, length, -1)


def _check_target(target: Any) -> nn.Module:
    """The target's backbone; raises HeadConfigError if a PTP head cannot run on it."""
    backbone, text = layered_backbone(target), target.config
    of_all = "full_attention" if getattr(text, "sliding_window", None) is None else "sliding_attention"
    others = set(getattr(text, "layer_types", None) or [of_all]) - {"full_attention"}
    if text.model_type in BYTES:
        raise HeadConfigError(
            f"target {target.name} is of type {text.model_type}, whose rows read more than keys, values and "
            "their own embedding; a PTP head needs a llama-like target; name another target, or another head"
        )
    if others:
        raise HeadConfigError(
            f"target {target.name} has layers of kind {', '.join(sorted(others))}; a PTP head needs full_attention in "
            "every layer; name another target"
        )
    return backbone


def _with_windows(layer: nn.Module) -> nn.Module:
    """A copy of a layer that shares its weights, with the attention of windows."""
    layer = sharing_copy(layer)
    for module in layer.modules():
        if hasattr(module, "config"):  # a copy, too
            module.config._attn_implementation = IMPLEMENTATION
    return layer


@torch.no_grad()
def _scaled_embedding(config: Any, backbone: nn.Module) -> AuxEmbedding:
    """An untrained embedding at the scale of the target's token embeddings."""
    embedding = build_embedding(config.u_embedding, config.hidden_size, config.u_features, config.u_hidden)
    wanted = backbone.get_input_embeddings().weight.float().std().cpu()
    centres = (torch.arange(256, dtype=torch.float32) + 0.5) / 256  # of equal bins of u
    factor = wanted / embedding(centres).std().clamp(min=1e-6)
    scaled: Any = getattr(embedding, "outer", embedding)
    for value in scaled.parameters():
        value.mul_(factor)
    return embedding.float()
