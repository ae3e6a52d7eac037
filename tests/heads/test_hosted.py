"""Heads on the states of a drafter: untrained ones are its distribution; with one state, and one per draft."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.heads_zoo import LM_HEAD, B, D, N, build

torch.set_num_threads(1)
FIRST = torch.arange(B)
STATES = torch.randn(B, N - 1, D, generator=torch.Generator().manual_seed(0))  # of a drafter of blocks
METHODS = pytest.mark.parametrize("method, states", [("dflash", STATES), ("mtp", STATES[:, :1])])


@METHODS
@pytest.mark.parametrize("circuit", ["ff", "cp", "hmm", "btree"])
@pytest.mark.parametrize("token_rank", [0, 2])
@pytest.mark.parametrize("ids", [None, [0, 2, 3]], ids=["all ids", "draft vocabulary"])
def test_untrained_marginals_are_the_drafters(
    method: str, states: Tensor, circuit: str, token_rank: int, ids: list[int] | None
) -> None:
    leaf = build("drafter", circuit, trunk={"method": method}, token_rank=token_rank, ids=ids)(states, FIRST).leaf
    wanted = (states.expand(-1, N - 1, -1) @ LM_HEAD[ids or slice(None)].T).log_softmax(-1)[:, :, None].expand_as(leaf)
    torch.testing.assert_close(leaf, wanted)


@METHODS
@pytest.mark.parametrize("token_rank", [0, 2])
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("drafts", [N - 1, 2])
def test_draft_params_are_those_of_training(
    method: str, states: Tensor, token_rank: int, in_blocks: bool, drafts: int
) -> None:
    head = build("drafter", "hmm", std=1.0, trunk={"method": method}, token_rank=token_rank)
    params, whole = head.draft_params(states, FIRST, drafts, in_blocks), head(states, FIRST, 1 + drafts)
    leaf = params.leaf if params.low is None else params.low.leaves(params.leaf)
    torch.testing.assert_close(leaf.log_softmax(-1), whole.leaf, rtol=1e-4, atol=1e-4)  # logits of about 50
    torch.testing.assert_close(params.root.log_softmax(-1), whole.root)
    torch.testing.assert_close(params.inner.log_softmax(-1), whole.inner, rtol=1e-4, atol=1e-5)
    assert params.evidence is not None and not params.evidence.any()
