"""A small head of every kind, with random weights, and hidden states for it."""

from __future__ import annotations

import torch

from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.backbone import BackboneHead
from vllm_mtpc.heads.base import Head

V, D, B, N, R = 7, 16, 3, 5, 3
EMBEDDING = torch.randn(V, D, generator=torch.Generator().manual_seed(2))
LM_HEAD = torch.randn(V, D, generator=torch.Generator().manual_seed(3))
OPTIONS = {
    "linear": {},
    "shared": {"expander_rank": 4},
    "low rank": {"expander_rank": 4, "component_rank": 2},
    "backbone": {
        "backbone_layers": 2,
        "backbone_heads": 4,
        "backbone_kv_heads": 2,
        "backbone_head_dim": 6,
        "backbone_width": 12,
        "aux_hidden_state_layer_ids": [0, 2],
        "component_rank": 2,
    },
}
KINDS = {"low rank": "shared"}  # variants of a head


def configure(name: str, circuit: str = "btree", r: int = R, n: int = N, vocab: int = V, **more: int) -> HeadConfig:
    """The config of a head."""
    sizes = {"circuit": circuit, "window": n, "num_components": 1 if circuit == "ff" else r, "verifier": "x"}
    target = {"hidden_size": D, "vocab_size": vocab}
    return HeadConfig.create(**sizes, target=target, head=KINDS.get(name, name), **OPTIONS[name] | more)


def build(
    name: str,
    circuit: str = "btree",
    r: int = R,
    n: int = N,
    vocab: int = V,
    std: float | None = None,
    bind: bool = True,
    **more: int,
) -> Head:
    """A new head; with `std`, every parameter is drawn that wide, so that nothing is zero by initialisation."""
    torch.manual_seed(0)
    head = build_head(configure(name, circuit, r, n, vocab, **more))
    if std is not None:
        for value in head.parameters():
            value.data.normal_(std=std)
    if bind:
        bind_target(head, vocab)
    return head.requires_grad_(False)


def bind_target(head: Head, vocab: int = V) -> None:
    """Bind what `head` reads of its target: the LM head, and the embedding of a backbone."""
    if head.needs_lm_head:
        lm_head = torch.randn(vocab, D, generator=torch.Generator().manual_seed(3))  # LM_HEAD
        head.bind_lm_head(lambda states: states @ lm_head.to(states).T)
    if isinstance(head, BackboneHead):
        head.bind_embedding(lambda tokens: EMBEDDING.to(head.hidden_dtype)[tokens])


def hidden_states(batch: int = B, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, D, generator=torch.Generator().manual_seed(seed))


def read_by(head: Head, batch: int = B, seed: int = 1) -> torch.Tensor:
    """What `head` reads: h [B, D], or states [B, N, D] of windows in one text that its backbone has read."""
    if not isinstance(head, BackboneHead):
        return hidden_states(batch, seed)
    at = torch.arange(batch)
    aux = hidden_states(batch * len(head.aux_layers), seed).view(1, batch, -1)
    return head.read(head.context(aux, at[None], torch.zeros_like(at)[None]), torch.zeros_like(at), at, at % V)
