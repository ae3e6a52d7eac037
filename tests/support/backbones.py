"""Heads with a backbone that know a little of a target's answers, and their drafts by the head's own definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.evabyte_reference import GreedyReference
from tests.support.models import minimise
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.head import Head, build_head

SMALL = {
    "layers": 2,
    "heads": 4,
    "kv_heads": 1,  # not the target's: pages of another size
    "head_dim": 32,
    "width": 96,
}


class Target(GreedyReference):
    """A target on transformers, by whole texts."""

    def __init__(self, folder: Path, layers: list[int]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        self.layers = layers

    def lend(self, head: Head) -> Head:
        head.leaves.bind_lm_head(self.model.lm_head)
        head.trunk.bind_embedding(self.model.get_input_embeddings())
        return head

    @torch.no_grad()
    def aux(self, tokens: list[int]) -> Tensor:
        """What a backbone reads, [1, T, m D]: the residual stream after these layers, the last one's too."""
        streams = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
            for layer in self.model.model.layers
        ]
        hooks.append(self.model.model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0])))
        self.model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        return torch.cat([streams[layer] for layer in self.layers], dim=-1)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        return self.model(torch.tensor([tokens])).logits[0]


def states(head: Head, aux: Tensor, starts: Tensor, first: Tensor) -> Tensor:
    """[W, n, D] of windows after positions starts[W] of one text, whose x_1 are first[W]."""
    place = torch.arange(aux.shape[1])[None]
    context = head.trunk.context(aux, place, torch.zeros_like(place))
    return head.trunk.read(context, torch.zeros_like(starts), starts, first)


def fit(
    folder: Path, target: Path, texts: list[list[int]], window: int = 4, steps: int = 30, seed: int = 0, **given: Any
) -> None:
    """A head fitted to windows of these texts, saved to `folder`; `given` may have some options of its sections."""
    trunk = {"kind": "backbone", "aux_hidden_state_layer_ids": [1, 2], **SMALL, **given.pop("trunk", {})}
    leaves = {"kind": "lm_head", "component_rank": 4, **given.pop("leaves", {})}
    settings = {"circuit": "hmm", "num_components": 2, "trunk": trunk, "leaves": leaves, **given}
    reader = Target(target, trunk["aux_hidden_state_layer_ids"])
    config = HeadConfig.create(**settings, window=window, target=reader.model.config, verifier="../target")
    torch.manual_seed(seed)
    head = reader.lend(build_head(config))
    rows = []
    for text in texts:
        windows = torch.tensor(text[1:]).unfold(0, window, 1)
        rows.append((reader.aux(text), torch.arange(len(windows)), windows))

    def loss() -> Tensor:
        losses = []
        for aux, starts, windows in rows:
            params = head(states(head, aux, starts, windows[:, 0]), windows[:, 0])
            losses.append(-head.circuit.conditional_log_probs(params, windows).flatten())
        return torch.cat(losses).mean()

    minimise(loss, head, steps, 3e-3)
    save_head(folder, config, head, {"command": "tests"}, "made by a test", torch.float32)
