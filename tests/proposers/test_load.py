"""The head in a worker: the modules of vLLM's model that it shares, and the dtype and shape of its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from vllm_mtpc.checkpoint import load_head, save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head, linear
from vllm_mtpc.proposers.heads import load
from vllm_mtpc.proposers.heads.load import load_served_head

V, D = 7, 8
CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
FIRST = torch.tensor([6, 0, 3])


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


def served(folder: Path, dtype: torch.dtype, **options) -> nn.Module:
    return load_served_head(str(folder), dtype, CPU, FakeTarget(torch.float32), torch.float32, **options)


@pytest.mark.parametrize("head_dtype", ["auto", "float32", "bfloat16", "float16"])
def test_the_head_has_the_dtype_that_is_asked_for(tmp_path: Path, head_dtype: str) -> None:
    head, hidden = served(save(tmp_path, "linear"), torch.bfloat16, head_dtype=head_dtype), torch.randn(3, D)
    wanted = torch.bfloat16 if head_dtype == "auto" else getattr(torch, head_dtype)
    assert head.hidden_dtype == wanted
    params = head.draft_params(hidden, FIRST, 2)
    assert params.leaf.dtype == wanted
    _, plain = load_head(tmp_path, wanted)
    same = plain.draft_params(hidden, FIRST, 2)
    # the same products, of weights laid out in another way: one rounding of logits below 0.1
    torch.testing.assert_close(params.leaf, same.leaf, rtol=0, atol=1e-3)
    torch.testing.assert_close(params.evidence, same.evidence, rtol=0, atol=1e-3)


@DTYPES
@pytest.mark.parametrize("rank, rows", [(0, 2), (2, 2), (3, 1)])
def test_large_unembeddings_are_divided_over_ranks(tmp_path: Path, monkeypatch, dtype, rank: int, rows: int) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(load, "_num_ranks", lambda: 4)
    monkeypatch.setattr(load, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(load, "_gather", lambda own: seen.append(own) or torch.cat([own] * 4))
    folder, bytes_needed = save(tmp_path, "linear"), 4 * 2 * V * D * dtype.itemsize
    monkeypatch.setitem(linear.SHARD_BYTES, "cpu", bytes_needed)
    head = served(folder, dtype, num_drafts=2)
    params = head.draft_params(torch.randn(3, D), FIRST, 2)
    own = 2 * 2 * 4 // dtype.itemsize + 2 * 2 * 2  # two float32 numbers per component, then K r rows of logits
    assert [tuple(part.shape) for part in seen] == [(3, own)], "one gather of equal sizes"
    assert params.leaf.shape == (3, 2, 2, V) and params.evidence.shape == (3, 2)
    logits = seen[0][:, 2 * 2 * 4 // dtype.itemsize :].view(3, 2, 2, 2)
    assert (logits[..., rows:] == 0).all() and (logits[..., :rows] != 0).all(), "rows of this rank, filled up"
    monkeypatch.setitem(linear.SHARD_BYTES, "cpu", bytes_needed + 1)
    served(folder, dtype, num_drafts=2).draft_params(torch.randn(3, D), FIRST, 2)
    assert len(seen) == 1, "small ones are replicated"
