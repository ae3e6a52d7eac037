"""Leaves on the states of a drafter: their definition, and where they start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.heads_zoo import D, V
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.hosted import HostedHead

torch.set_num_threads(1)
N, R, RANK = 5, 3, 2
TARGET = {"vocab_size": V, "hidden_size": D}
LM_HEAD = nn.Linear(D, V, bias=False).requires_grad_(False)
STATES = torch.randn(4, N - 1, D, generator=torch.Generator().manual_seed(0))
FIRST = torch.tensor([0, 3, 1, 2])


def config_of(circuit: str = "hmm", method: str = "mtp", **given: object) -> HeadConfig:
    sizes = {"num_components": 1 if circuit == "ff" else R, "component_rank": 0 if circuit == "ff" else RANK}
    given = {"expander_rank": 6, **sizes, "drafter": {"method": method}, **given}
    return HeadConfig.create(head="hosted", circuit=circuit, window=N, target=TARGET, verifier="-", **given)


def make(circuit: str = "hmm", is_random: bool = False) -> HostedHead:
    torch.manual_seed(0)
    head = build_head(config_of(circuit))
    head.bind_lm_head(LM_HEAD)
    if is_random:
        for weight in head.parameters():
            nn.init.normal_(weight, std=0.3)
    return head.requires_grad_(False)


@pytest.mark.parametrize("circuit", ["ff", "cp", "hmm", "btree"])
@pytest.mark.parametrize("has_block", [False, True])
def test_untrained_marginals_are_the_drafters(circuit: str, has_block: bool) -> None:
    head, states = make(circuit), STATES if has_block else STATES[:, :1]
    leaf = head(states).leaf
    wanted = LM_HEAD(states.expand(-1, N - 1, -1)).log_softmax(-1)[:, :, None].expand_as(leaf[:, 1:])
    torch.testing.assert_close(leaf[:, 1:], wanted)
    assert leaf[:, 0].unique().numel() == 1  # the latent does not depend on x_1


def test_leaves_of_one_state_are_as_defined() -> None:
    head, state = make(is_random=True), STATES[:, 0]
    leaf = head(state).leaf
    assert torch.equal(leaf, head(state[:, None]).leaf)
    for k in range(1, N):
        own = state + torch.nn.functional.silu(state @ head.down_weight[k - 1].T) @ head.up_weight[k - 1].T
        for z in range(R):
            logits = LM_HEAD(own) + own @ head.component_in[k, z].T @ head.component_out[k]
            torch.testing.assert_close(leaf[:, k, z], logits.log_softmax(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_draft_params_are_those_of_training(in_blocks: bool) -> None:
    head = make(is_random=True)
    params, whole = head.draft_params(STATES, FIRST, N - 1, in_blocks), head(STATES)
    leaf = params.leaf if params.low is None else params.low.leaves(params.leaf)
    torch.testing.assert_close(leaf.log_softmax(-1), whole.leaf[:, 1:])
    assert not params.evidence.any()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"drafter": None}, "heads 'hosted' and 'product' have one, others none"),
        ({"component_rank": 0}, "needs component_rank"),
        ({"lora_layers": 2}, "whose states are not the target's"),
    ],
)
def test_inconsistent_config_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(HeadConfigError, match=words):
        config_of(**given)
