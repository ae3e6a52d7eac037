"""The student of a PTP head: the target with a gated LoRA, read at rows that carry u in place of a token.

Source: "Parallel Token Prediction for Language Models", arXiv 2512.21323. Real tokens run through the plain target, so
one prefix serves every window that starts in it; auxiliary rows run through copies of the layers that share the
target's weights and add their own low-rank ones (as in `vllm_mtpc.heads.adapters`). Both passes run the target's own
forward, with the attention of `vllm_mtpc.heads.ptp.windows`.

A window at index t holds rows j = 0 .. n - 1 that carry u_(t+1+j). The position of a row is the index of the token it
predicts, less one: t + j where row j names token t + 1 + j itself (o-ptp), t + 1 + j where it gives the distribution of
the next token (c-ptp). Behind the final norm the rows of drafts may go through a late network
(`vllm_mtpc.heads.ptp.late`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.adapters import AdaptedLayers, layered_backbone, sharing_copy, view_of
from vllm_mtpc.heads.ptp.embedding import AuxEmbedding, build_embedding
from vllm_mtpc.heads.ptp.late import LateNetwork, build_late
from vllm_mtpc.heads.ptp.windows import IMPLEMENTATION, SHARE, Layout, Prefix, Record, register

__all__ = ["Prefix", "Student"]

UNINFORMED = 0.5  # what every row carries where u tells nothing: greedy decoding, the independent baseline


class Student(AdaptedLayers):
    """A PTP head on its target (a `vllm_mtpc.hf.Target`); `config` is the head's PtpConfig.

    Its parameters are float32: the adapters', the embedding's, the late network's. B of every adapter starts at zero,
    as does what the late network adds; the rest comes from torch's generator, the embedding at the scale of the
    target's token embeddings. Raises HeadConfigError for a target that is not made of full-attention layers, or that
    the config is not of.
    """

    def __init__(self, target: Any, config: Any) -> None:
        super().__init__(target)
        register()
        backbone = check_target(target, config)
        self.config = config
        plain, adapted = (view_of(backbone, [_with_windows(layer) for layer in backbone.layers]) for _ in range(2))
        self.adapt(adapted, config.lora_rank, config.lora_alpha)
        self._plain, self._adapted = (plain,), (adapted,)  # in tuples, as the target
        self.embedding = _scaled_embedding(config, backbone).to(target.device)
        late = build_late(config.hidden_size, config.late_width)
        self.late = None if late is None else late.float().to(target.device)

    @property
    def shift(self) -> int:
        """Position of row 0 of a window, less that of the token it starts at."""
        return 0 if self.config.variant == "o-ptp" else 1

    @torch.no_grad()
    def prefix(self, tokens: Tensor, documents: Tensor | None = None) -> Prefix:
        """What the plain target computes of tokens[R, S]; documents[R, S] as in Target.hidden."""
        target = self.target
        tokens, packed = tokens.to(target.device, torch.long), target.packed(documents)
        if documents is None:
            documents = torch.zeros_like(tokens)
            positions = torch.arange(tokens.shape[1], device=target.device).expand_as(tokens)
        else:
            documents, positions = documents.to(target.device, torch.long), packed["position_ids"]
        record = Record(target.backbone.config._attn_implementation)
        hidden = self._plain[0](input_ids=tokens, use_cache=False, **packed, **{SHARE: record}).last_hidden_state
        return Prefix(hidden, record.keys, record.values, positions, documents)

    def aux(self, prefix: Prefix, row: Tensor, start: Tensor, u: Tensor) -> Tensor:
        """States [B, n, D], after the final norm, of windows at (row[B], start[B]) whose rows carry u[B, n]."""
        device = self.target.device
        u = u.to(device, torch.float32)
        if not self.config.informed:
            u = torch.full_like(u, UNINFORMED)
        embeds = self.embedding(u).to(self.target.dtype)
        return self._windows(self._adapted[0], prefix, row.to(device), start.to(device), self.shift, embeds)

    forward = aux

    @torch.no_grad()
    def plain(self, prefix: Prefix, row: Tensor, start: Tensor, tokens: Tensor) -> Tensor:
        """States [B, m, D] of the plain target where the text goes on with tokens[B, m] behind (row, start)."""
        device = self.target.device
        embeds = self._plain[0].get_input_embeddings()(tokens.to(device, torch.long))
        return self._windows(self._plain[0], prefix, row.to(device), start.to(device), 1, embeds)

    @property
    def first_row(self) -> int:
        """Row of a window that gives its first draft: row 0 of o-ptp says which token x_1 is, and x_1 is given."""
        return 1 if self.config.variant == "o-ptp" else 0

    def states(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """States [B, m, D] for lm_head of aux's hidden[B, m, D] where the text goes on with x_1 .. = tokens[B, n]."""
        if self.late is None:
            return hidden
        first, rows = self.first_row, hidden[:, self.first_row :]
        front = self._token_embeddings(tokens[:, : rows.shape[1]].clamp(min=0))
        return torch.cat([hidden[:, :first], self.late(rows, front)], 1)

    def chain(self, hidden: Tensor, first: Tensor, choose: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Drafts [B, K] by the late network; hidden[B, K, D] of their rows, x_1 first[B], as `LateNetwork.draft`."""
        return self.late.draft(hidden, first.to(hidden.device), self._token_embeddings, choose)

    @torch.no_grad()
    def _token_embeddings(self, tokens: Tensor) -> Tensor:
        return self._plain[0].get_input_embeddings()(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] float32: the target's own lm_head."""
        return self.target.logits(hidden)

    @torch.no_grad()
    def take(self, lora: Mapping[str, Tensor], embedding: AuxEmbedding, late: LateNetwork | None = None) -> None:
        """Copy weights into this student; without `late` its own late network, if any, stays as it is.

        Raises HeadConfigError where the adapters are not of its shapes.
        """
        self.take_lora(lora)
        self.embedding.load_state_dict(embedding.state_dict())
        if late is not None:
            self.late.load_state_dict(late.state_dict())

    def _windows(
        self, view: nn.Module, prefix: Prefix, row: Tensor, start: Tensor, shift: int, embeds: Tensor
    ) -> Tensor:
        count, length, _ = embeds.shape
        offsets = torch.arange(shift, shift + length, device=row.device)
        arguments: dict[str, Any] = {
            "inputs_embeds": embeds.flatten(0, 1)[None],  # [1, B * n, D]
            "position_ids": (prefix.positions[row, start][:, None] + offsets).flatten()[None],
            # transformers hands a mask of four dimensions on as it is: it need not build one
            "attention_mask": embeds.new_zeros(1, 1, 1, 1),
            SHARE: Layout(prefix, row, start, length),
        }
        return view(**arguments, use_cache=False).last_hidden_state.view(count, length, -1)


def check_target(target: Any, config: Any) -> nn.Module:
    """The target's backbone; raises HeadConfigError where a PTP head cannot stand on it."""
    backbone, text = layered_backbone(target), target.config
    kinds = set(getattr(text, "layer_types", None) or [_kind(text)])
    if kinds != {"full_attention"}:
        raise HeadConfigError(
            f"target {target.name} has layers of kind {', '.join(sorted(kinds - {'full_attention'}))}; a PTP head "
            "needs full_attention in every layer; name another target"
        )
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "layers": len(backbone.layers)}
    wanted = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "layers": config.num_layers}
    for name, size in sizes.items():
        if size != wanted[name]:
            raise HeadConfigError(
                f"target {target.name} has {name}={size}, the head was made for {wanted[name]}; name its own target"
            )
    return backbone


def _kind(text: Any) -> str:
    return "sliding_attention" if getattr(text, "sliding_window", None) is not None else "full_attention"


def _with_windows(layer: nn.Module) -> nn.Module:
    """A copy of a layer around the same weights, with the attention of windows."""
    layer = sharing_copy(layer)
    for module in layer.modules():
        if hasattr(module, "config"):  # a copy, too
            module.config._attn_implementation = IMPLEMENTATION
    return layer


def _scaled_embedding(config: Any, backbone: nn.Module) -> AuxEmbedding:
    """An untrained embedding whose values are as large as those of the target's tokens."""
    embedding = build_embedding(config.u_embedding, config.hidden_size, config.u_features, config.u_hidden)
    with torch.no_grad():
        wanted = backbone.get_input_embeddings().weight.float().std().cpu()
        factor = wanted / embedding.table().std().clamp(min=1e-6)
        last = getattr(embedding, "outer", embedding)
        for value in last.parameters():
            value.mul_(factor)
    return embedding.float()
