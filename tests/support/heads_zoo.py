"""A small head of every kind, with random weights, and hidden states for it."""

from __future__ import annotations

from typing import Any

import torch

from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.head import Head, build_head

V, D, B, N, R = 7, 16, 3, 5, 3
EMBEDDING = torch.randn(V, D, generator=torch.Generator().manual_seed(2))
LM_HEAD = torch.randn(V, D, generator=torch.Generator().manual_seed(3))
SHARED = {"kind": "lm_head", "expander_rank": 4, "component_rank": 0}
BACKBONE = {"kind": "backbone", "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 6, "width": 12}
OPTIONS: dict[str, dict[str, Any]] = {
    "linear": {"trunk": {"kind": "none"}, "leaves": {"kind": "own"}},
    "shared": {"trunk": {"kind": "none"}, "leaves": SHARED},
    "low rank": {"trunk": {"kind": "none"}, "leaves": SHARED | {"component_rank": 2}},
    "backbone": {
        "trunk": BACKBONE | {"aux_hidden_state_layer_ids": [0, 2]},
        "leaves": {"kind": "lm_head", "component_rank": 2},
    },
    "mlp": {"trunk": {"kind": "mlp", "width": 5}, "leaves": SHARED},
    "mlp low rank": {"trunk": {"kind": "mlp", "width": 5}, "leaves": SHARED | {"component_rank": 2}},
    "mlp own": {"trunk": {"kind": "mlp", "width": 5, "layers": 2}, "leaves": {"kind": "own"}},
    "drafter": {"trunk": {"kind": "drafter"}, "leaves": SHARED | {"component_rank": 2}},
}


def configure(
    name: str, circuit: str = "btree", r: int = R, n: int = N, vocab: int = V, columns: int | None = None, **more: Any
) -> HeadConfig:
    """The config of a head; more: of its leaves, or `trunk`, of its trunk."""
    trunk = OPTIONS[name]["trunk"] | more.pop("trunk", {})
    given = {"trunk": trunk, "leaves": OPTIONS[name]["leaves"] | more}
    sizes = {"circuit": circuit, "window": n, "num_components": 1 if circuit == "ff" else r, "verifier": "x"}
    return HeadConfig.create(**sizes, target={"hidden_size": D, "vocab_size": vocab}, draft_vocab_size=columns, **given)


def build(
    name: str,
    circuit: str = "btree",
    r: int = R,
    n: int = N,
    vocab: int = V,
    std: float | None = None,
    bind: bool = True,
    ids: list[int] | None = None,
    **more: Any,
) -> Head:
    """A new head; with `std`, every parameter is drawn that wide, so that nothing is zero by initialisation."""
    torch.manual_seed(0)
    head = build_head(configure(name, circuit, r, n, vocab, ids and len(ids), **more))
    if ids:
        head.set_vocabulary(torch.tensor(ids))
    if std is not None:
        for value in head.parameters():
            value.data.normal_(std=std)
    if bind:
        bind_target(head, vocab)
    return head.requires_grad_(False)


def bind_target(head: Head, vocab: int = V) -> None:
    """Bind what `head` reads of its target: the LM head, and the embeddings."""
    if head.leaves.needs_lm_head:
        rows = LM_HEAD[:vocab] if head.vocabulary is None else LM_HEAD[head.vocabulary.ids]
        head.leaves.bind_lm_head(lambda states: states @ rows.to(states).T)
    if head.trunk.needs_embedding:
        head.trunk.bind_embedding(lambda tokens: EMBEDDING.to(head.hidden_dtype)[tokens])


def hidden_states(batch: int = B, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, D, generator=torch.Generator().manual_seed(seed))


def read_by(head: Head, batch: int = B, seed: int = 1) -> torch.Tensor:
    """What `head` reads: h [B, D], or states [B, N, D] of windows in one text that its backbone has read."""
    if not head.trunk.is_per_position:
        return hidden_states(batch, seed)
    at = torch.arange(batch)
    aux = hidden_states(batch * len(head.trunk.aux_layers), seed).view(1, batch, -1)
    return head.trunk.read(
        head.trunk.context(aux, at[None], torch.zeros_like(at)[None]), torch.zeros_like(at), at, at % V
    )
