"""A small head of every kind, with random weights, and hidden states for it."""

from __future__ import annotations

import torch

from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.base import Head

V, D, B, N, R = 7, 16, 3, 5, 3
TARGET = {"hidden_size": D, "vocab_size": V}
LM_HEAD = torch.randn(V, D, generator=torch.Generator().manual_seed(3))
OPTIONS = {
    "linear": {},
    "shared": {"expander_rank": 4},
    "mlp": {"expander_layers": 2},
    "transformer": {"expander_layers": 2, "expander_heads": 4},
}


def build(
    name: str, circuit: str = "btree", seed: int = 0, std: float | None = None, bind: bool = True, **more: int
) -> Head:
    """A new head; with `std`, every parameter is drawn that wide, so that nothing is zero by initialisation."""
    components = 1 if circuit == "ff" else R
    sizes = {"circuit": circuit, "window": N, "num_components": components}
    config = HeadConfig.create(**sizes, target=TARGET, verifier="x", head=name, **OPTIONS[name], **more)
    torch.manual_seed(seed)
    head = build_head(config)
    if std is not None:
        for value in head.parameters():
            value.data.normal_(std=std)
    if head.needs_lm_head and bind:
        head.bind_lm_head(lambda states: states @ LM_HEAD.to(states).T)
    return head.requires_grad_(False)


def hidden_states(batch: int = B, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, D, generator=torch.Generator().manual_seed(seed))
