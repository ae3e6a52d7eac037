"""The student of a PTP head: the target with a gated LoRA, read at rows that carry u in place of a token.

Source: "Parallel Token Prediction for Language Models", arXiv 2512.21323. Real tokens run through the plain target,
auxiliary rows through copies of the layers that share the target's weights and add low-rank ones (`heads/adapters.py`).

A window at index t holds rows j = 0 .. n - 1 that carry u_(t+1+j). The position of a row is the index of the token it
predicts, less one: t + j where row j names token t + 1 + j itself (o-ptp), t + 1 + j where it gives the distribution of
the next token (c-ptp). After the final norm the rows of drafts may run through a late network
(`vllm_mtpc.heads.ptp.layers`).

Many short windows are computed in one pass. The rows of window b see the tokens of the document at (row_b, start_b) up
to start_b, whose keys and values come from a pass over the packed rows, and the window's own rows up to themselves.
Both passes run the target's own attention (`text_attention`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.adapters import AdaptedLayers, layered_backbone, sharing_copy, view_of
from vllm_mtpc.heads.ptp.distribution import draft_tokens
from vllm_mtpc.heads.ptp.layers import PtpHead, PtpLayers
from vllm_mtpc.heads.trunk.backbone import KeysValues, WindowGrid, windows_mask
from vllm_mtpc.heads.trunk.base import document_positions

UNUSED_U = 0.5  # of rows whose u is not used: greedy decoding, the independent baseline
BYTES = ("evabyte", "tpu_llama")  # summaries of older windows; embeddings made of several tokens
IMPLEMENTATION = "mtpc_text"  # the name of `text_attention` among transformers' attention functions
MAX_PADDING = 1.25  # most slots of a grid of windows, by the number of windows


class Prefix(NamedTuple):
    """The target's states, keys and values of R packed rows of S tokens."""

    hidden: Tensor  # [R, S, D] after the final norm, as of Target.hidden
    layers: list[KeysValues]  # [R, G, S, d] each, keys are rotated
    documents: Tensor  # [R, S] int64, -1: padding


def text_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *,
    implementation: str,
    extend: Callable[[Tensor, Tensor], KeysValues],
    **kwargs: Any,
) -> Any:
    """Attention function of transformers: the function `implementation`, of the keys and values by `extend`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    return function(module, query, *extend(key, value), mask, **kwargs)


class Student(AdaptedLayers):
    """A PTP head on a `vllm_mtpc.hf.Target`: adapters and layers (embedding at the scale of the target's), in float32.

    Raises HeadConfigError for a target with other layers than full attention.
    """

    def __init__(self, target: Any, config: Any) -> None:
        from transformers import AttentionInterface

        super().__init__(target)
        AttentionInterface.register(IMPLEMENTATION, text_attention)
        backbone = _check_target(target)
        self.config, self.first_row = config, config.first_row  # the row of a window's first draft
        plain, adapted = (view_of(backbone, [_with_text(layer) for layer in backbone.layers]) for _ in range(2))
        self.adapt(adapted, config.lora_rank, config.lora_alpha)
        self._plain, self._adapted = (plain,), (adapted,)  # in tuples, as the target
        self.layers = _scaled_layers(config, backbone).to(target.device)

    @torch.no_grad()
    def prefix(self, tokens: Tensor, documents: Tensor | None = None) -> Prefix:
        """Run the plain target over tokens [R, S]; documents [R, S] as in `Target.hidden`, None: one in each row."""
        target, layers = self.target, list[KeysValues]()

        def keep(*own: Tensor) -> KeysValues:
            layers.append(own)
            return own

        tokens = tokens.to(target.device, torch.long)
        hidden = self._run(self._plain[0], keep, input_ids=tokens, **target.packed(documents))
        return Prefix(hidden, layers, torch.zeros_like(tokens) if documents is None else documents.to(tokens))

    def aux(self, prefix: Prefix, row: Tensor, start: Tensor, u: Tensor) -> Tensor:
        """Run the rows of windows, with u [B, n] in [0, 1), through the adapted layers; [B, n, D] after the final norm.

        A window reads the packed row `row` [B] int64 of the prefix up to the token at index `start` [B] int64.
        """
        u = u.to(self.target.device, torch.float32)
        embeds = self.layers(u if self.config.informed else torch.full_like(u, UNUSED_U))
        return self._windows(self._adapted[0], prefix, row, start, 1 - self.first_row, embeds.to(self.target.dtype))

    @torch.no_grad()
    def plain(self, prefix: Prefix, row: Tensor, start: Tensor, tokens: Tensor) -> Tensor:
        """Return the plain target's states [B, m, D] of tokens [B, m] that follow (row [B], start [B])."""
        return self._windows(self._plain[0], prefix, row, start, 1, self.target.embed(tokens))

    def states(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return hidden [B, m, D] of `aux` after the late network, if any, given tokens [B, n], x_1 and the next."""
        if self.layers.late is None:
            return hidden
        before, rows = hidden.tensor_split([self.first_row], 1)
        front = self.target.embed(tokens[:, : rows.shape[1]].clamp(min=0))
        return torch.cat([before, self.layers.late(rows, front)], 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] float32 of the target's own lm_head for hidden [..., D]."""
        return self.target.logits(hidden)

    def draft(
        self,
        prefix: Prefix,
        row: Tensor,
        start: Tensor,
        u: Tensor,
        first: Tensor,
        greedy: bool = False,
        picks: Tensor | None = None,
    ) -> Tensor:
        """Return drafts [B, K] of windows, as in `aux`, after x_1 `first` [B], from u [B, 1 + K] of x_1 and the drafts.

        greedy: each draft is the argmax. picks: [B, 1 + K], pick drafts (c-ptp, late) in place of u, which rows carry.
        """
        drafting = slice(self.first_row, self.first_row + u.shape[1] - 1)
        hidden = self.aux(prefix, row, start, u[:, : drafting.stop])[:, drafting]
        numbers = (u if picks is None else picks)[:, 1:].to(hidden.device)

        def choose(states: Tensor, numbers: Tensor) -> Tensor:
            logits = self.logits(states)
            return logits.argmax(-1) if greedy else draft_tokens(self.config, logits, numbers)

        if self.layers.late is None:
            return choose(hidden.flatten(0, 1), numbers.flatten()).view(numbers.shape)
        first = first.to(hidden.device)
        return self.layers.late.draft(hidden, first, self.target.embed, lambda state, k: choose(state, numbers[:, k]))

    @torch.no_grad()
    def take(self, head: PtpHead) -> None:
        """Copy adapters and layers; a head without a late network leaves this one's. Raises as `take_lora`."""
        self.take_lora(head.lora)
        self.layers.load_state_dict(head.layers.state_dict(), strict=head.layers.late is not None)

    def _windows(
        self, view: nn.Module, prefix: Prefix, row: Tensor, start: Tensor, shift: int, embeds: Tensor
    ) -> Tensor:
        """Return states [B, n, D] of rows embeds [B, n, D], the first one `shift` after (row [B], start [B])."""
        row, start, length = row.to(embeds.device), start.to(embeds.device), embeds.shape[1]
        context = int(start.max()) + 1  # tokens that are read
        grid, layers = WindowGrid(row, length, context, MAX_PADDING), iter(prefix.layers)
        starts = grid.place(start)  # [G, W]
        seen = windows_mask(starts, prefix.documents[grid.rows, :context], length)
        seen[..., context:].tril_()
        at = document_positions(prefix.documents)[grid.rows].gather(1, starts) + shift
        at = at[..., None] + torch.arange(length, device=row.device)

        def read_text(*own: Tensor) -> KeysValues:
            pairs = zip(next(layers), own, strict=True)
            key, value = (torch.cat([before[grid.rows, :, :context], part], 2) for before, part in pairs)
            return key, value

        states = self._run(
            view,
            read_text,
            inputs_embeds=grid.place(embeds).flatten(1, 2),  # [G, W * n, D]
            position_ids=at.flatten(1),
            # transformers passes a mask of four dimensions unchanged
            attention_mask=embeds.new_zeros(seen.shape).masked_fill_(~seen, torch.finfo(embeds.dtype).min),
        )
        return states.view(-1, *embeds.shape[1:])[grid.index]

    def _run(self, view: nn.Module, extend: Callable[[Tensor, Tensor], KeysValues], **arguments: Any) -> Tensor:
        implementation = self.target.backbone.config._attn_implementation
        return view(use_cache=False, implementation=implementation, extend=extend, **arguments).last_hidden_state


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


def _with_text(layer: nn.Module) -> nn.Module:
    """A copy of a layer that shares its weights, with `text_attention`."""
    layer = sharing_copy(layer)
    for module in layer.modules():
        if hasattr(module, "config"):  # a copy, too
            module.config._attn_implementation = IMPLEMENTATION
    return layer


@torch.no_grad()
def _scaled_layers(config: Any, backbone: nn.Module) -> PtpLayers:
    """Untrained layers in float32, with the embedding at the scale of the target's token embeddings."""
    layers = PtpLayers(config)
    wanted = backbone.get_input_embeddings().weight.float().std().cpu()
    centres = (torch.arange(256, dtype=torch.float32) + 0.5) / 256  # of equal bins of u
    factor = wanted / layers(centres).std().clamp(min=1e-6)
    for value in layers.outer.parameters():
        value.mul_(factor)
    return layers.float()
