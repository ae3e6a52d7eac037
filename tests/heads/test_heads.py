"""The contract of every head: its function of the hidden state, initialisation and training."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from tests.support.heads_zoo import LM_HEAD, OPTIONS, B, N, R, V, build, hidden_states, read_by
from vllm_mtpc.circuits import CIRCUITS
from vllm_mtpc.heads.base import Head

torch.set_num_threads(1)
ALL = pytest.mark.parametrize("name", OPTIONS)


def defined_logits(name: str, head: Head, h: torch.Tensor, k: int, z: int) -> torch.Tensor:
    """Logits [V] of position k and component z of one hidden state [D], as defined."""
    if name == "shared":
        return LM_HEAD @ (h + head.up_weight[k, z] @ F.silu(head.down_weight[k] @ h))
    if name == "low rank":
        state = h + head.up_weight[k, 0] @ F.silu(head.down_weight[k] @ h)
        return LM_HEAD @ state + head.component_out[k].T @ (head.component_in[k, z] @ state)
    if name == "backbone":  # h: states [N, D]
        difference = 0 if head.circuit.num_components == 1 else (head.component_in[k, z] @ h[k]) @ head.component_out[k]
        return LM_HEAD @ h[k] + difference if k else torch.zeros(V)
    return head.leaf_weight[k, z] @ h


@ALL
@pytest.mark.parametrize("circuit", CIRCUITS)
def test_leaves_and_sums_equal_their_definition(name, circuit):
    head = build(name, circuit, std=0.3)
    hidden = read_by(head)
    leaf, root, inner, _ = head(hidden)
    r = head.circuit.num_components
    assert leaf.shape == (B, N, r, V) and root.shape == (B, r) and inner.shape == (B, head.circuit.num_inner, r, r)
    for b in range(B):
        for k in range(N):
            for z in range(r):
                expected = defined_logits(name, head, hidden[b], k, z).log_softmax(-1)
                # Other orders of summation over at most 64 terms of size about 1, three layers deep: float32 rounding.
                torch.testing.assert_close(leaf[b, k, z], expected, rtol=1e-4, atol=1e-4)
    hidden = hidden[:, 0] if name == "backbone" else hidden
    if head.circuit.has_root:
        torch.testing.assert_close(root, (hidden @ head.root_weight.T).log_softmax(-1))
    if head.circuit.num_inner:
        rows = torch.einsum("bd,fzyd->bfzy", hidden, head.inner_weight) + head.inner_bias
        torch.testing.assert_close(inner, rows.log_softmax(-1))


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_are_float32_and_normalised_for_half_precision_weights(name, dtype):
    head = build(name, std=0.3).to(dtype)
    params = head(read_by(head).to(dtype))
    for part in params[:3]:
        assert part.dtype == torch.float32
        torch.testing.assert_close(part.exp().sum(-1), torch.ones(part.shape[:-1]), rtol=0, atol=5e-6)


@ALL
def test_training_fits_windows_and_moves_every_parameter(name):
    head = build(name).requires_grad_(True)
    before = copy.deepcopy(head.state_dict())
    tokens = torch.randint(0, V, (8, N), generator=torch.Generator().manual_seed(4))
    first_is_given = math.log(V) if name == "backbone" else 0
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-2)
    for _ in range(150):
        hidden = read_by(head, 8)
        loss = -head.circuit.log_prob(head(hidden), tokens).mean() - first_is_given
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.1  # nats for five tokens; log 7 = 1.95 each by chance
    assert torch.equal(head.circuit.greedy(head(hidden), tokens[:, :1]), tokens)
    for key, value in head.state_dict().items():  # zeros at initialisation have a gradient too
        assert not torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", ["shared", "low rank"])
def test_shared_head_starts_at_the_target_distribution(name):
    head, hidden = build(name), hidden_states()
    distribution = (hidden @ LM_HEAD.T).log_softmax(-1)[:, None, None]
    difference = (head(hidden).leaf - distribution).abs()
    # A state moves by 0.01 * sqrt(4) * |silu| <= 0.1 per entry, 16 entries against weights of size 1: below 0.4. A
    # component adds two numbers near 1 times 0.01.
    assert difference.max() < 0.5
    assert len({tuple(part.tolist()) for part in head(hidden).leaf[0].flatten(0, 1)}) == N * R  # all different
    head.up_weight.zero_()
    if head.component_rank:
        head.component_out.zero_()
    torch.testing.assert_close(head(hidden).leaf, distribution.expand(-1, N, R, -1))
