"""The head in a worker: what of vLLM's model it is lent, and in which dtype and shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from vllm_mtpc.checkpoint import load_head, save_head
from vllm_mtpc.config import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.proposers.load import load_served_head

V, D = 7, 8


class FakeTarget(nn.Module):
    """vLLM's `compute_logits`: two-dimensional states of the model's dtype; here with padding left in."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(D, V, bias=False, dtype=dtype)
        self.seen: list[torch.Tensor] = []

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        self.seen.append(states)
        return nn.functional.pad(self.lm_head(states), (0, 5), value=1e4)  # would win every draft


def save(folder: Path, head: str) -> Path:
    target = {"hidden_size": D, "vocab_size": V}
    config = HeadConfig.create(circuit="cp", window=4, num_components=2, target=target, verifier="x", head=head)
    torch.manual_seed(1)
    save_head(folder, config, build_head(config), {}, "card", torch.float32)
    return folder


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_needs_one_reads_the_targets_lm_head(tmp_path: Path, target_dtype, head_dtype) -> None:
    target = FakeTarget(target_dtype)
    head = load_served_head(str(save(tmp_path, "shared")), head_dtype, torch.device("cpu"), target, target_dtype)
    hidden = torch.randn(3, D).to(head_dtype)
    leaf = head(hidden, 3).leaf
    assert leaf.shape == (3, 3, 2, V) and leaf.dtype == torch.float32
    assert [(tuple(states.shape), states.dtype) for states in target.seen] == [((3 * 3 * 2, D), target_dtype)]
    _, same = load_head(tmp_path, head_dtype)
    same.bind_lm_head(lambda states: target.lm_head(states.to(target_dtype)))
    assert torch.equal(leaf, same(hidden, 3).leaf)
    assert not any(name.startswith("lm_head") for name, _ in head.named_parameters())


def test_a_head_with_its_own_unembedding_reads_nothing_of_the_target(tmp_path: Path) -> None:
    target = FakeTarget(torch.float32)
    head = load_served_head(str(save(tmp_path, "linear")), torch.float32, torch.device("cpu"), target, torch.float32)
    head(torch.randn(3, D))
    assert not target.seen
