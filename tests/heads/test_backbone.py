"""A backbone's states against a definition of one window at a time, without batches, caches or torch's attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.drafters import draft_states
from tests.support.heads_zoo import EMBEDDING, D, build
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.head import Head
from vllm_mtpc.heads.trunk import backbone

torch.set_num_threads(1)
S = 11
# Two documents and padding in one row, one document in the other.
DOCUMENT = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 2, [2] * 11])
POSITION = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1], list(range(11))])
AUX = torch.randn(2, S, 2 * D, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
# Windows in no order, several of one row, one of them twice with another x_1.
ROW, START, FIRST = (
    torch.tensor(part) for part in ([1, 0, 1, 1, 0, 1, 1], [2, 4, 7, 2, 6, 10, 0], [1, 2, 3, 4, 5, 6, 0])
)


def head_of(from_anchor: bool = False) -> Head:
    return build("backbone", "hmm", std=0.3, trunk={"sample_from_anchor": from_anchor}).double()


def read(head: Head, aux: Tensor = AUX, first: Tensor = FIRST) -> Tensor:
    return head.trunk.read(head.trunk.context(aux, POSITION, DOCUMENT), ROW, START, first)


def slow(head: Head) -> Tensor:
    """States [windows, n, D], one window after the other."""
    weights, found, steps = dict(head.trunk.backbone.named_parameters()), [], torch.arange(5 - head.trunk.from_anchor)
    for row, start, first in zip(ROW.tolist(), START.tolist(), FIRST.tolist(), strict=True):
        seen = (DOCUMENT[row] == DOCUMENT[row, start]) & (torch.arange(S) <= start)
        queries = torch.stack([EMBEDDING[first].double(), *[head.trunk.backbone.mask_embedding] * (len(steps) - 1)])
        places = torch.cat([POSITION[row, seen], POSITION[row, start] + 1 + steps])
        found.append(draft_states(weights, AUX[row, seen], queries, places, theta=10000.0, eps=1e-6))
    return torch.stack(found)


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("context_per_query", [100, 1])  # a window in each pass, or up to two
def test_states_are_those_of_one_window_at_a_time(from_anchor, context_per_query, monkeypatch):
    monkeypatch.setattr(backbone, "CONTEXT_PER_QUERY", context_per_query)
    head = head_of(from_anchor)
    # float64; angles are float32 in both, products of them too: the same to about 1e-7 of an angle of up to 15.
    torch.testing.assert_close(read(head), slow(head), rtol=0, atol=2e-6)


def test_gradients_are_those_of_one_window_at_a_time():
    head, weight = head_of().requires_grad_(True), torch.randn(len(ROW), 5, D, dtype=torch.float64)
    names = [name for name, _ in head.named_parameters() if name.startswith("trunk.")]
    parameters = [head.get_parameter(name) for name in names]
    found, wanted = (torch.autograd.grad((states * weight).sum(), parameters) for states in (read(head), slow(head)))
    for name, one, other in zip(names, found, wanted, strict=True):
        assert other.abs().max() > 1e-3, name
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_anchor_layout_reads_each_leaf_one_query_earlier():
    """Its leaves of positions 2 to n are the other layout's for the same states, moved by one."""
    head, other = head_of(True), head_of(False)
    other.load_state_dict(head.state_dict())
    states = torch.randn(3, 5, D, dtype=torch.float64)
    ours, theirs = head(states[:, 1:], FIRST[:3]), other(states, FIRST[:3])
    torch.testing.assert_close(ours.leaf, theirs.leaf)


SIZES = {"hidden_size": 32, "vocab_size": 9, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 48}
SIZES |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 5e5}}


def config(target: dict = SIZES, **options) -> HeadConfig:
    sizes = {"circuit": "cp", "window": 4, "num_components": 2, "verifier": "../target"}
    parts = {"trunk": {"kind": "backbone", **options}, "leaves": {"kind": "lm_head"}}
    return HeadConfig.create(**sizes, **parts, target=target)


def test_default_sizes_are_those_of_the_target():
    made = config()
    trunk = made.trunk
    assert (trunk.heads, trunk.kv_heads, trunk.head_dim, trunk.width) == (4, 2, 8, 48)
    assert (trunk.theta, trunk.eps, trunk.sample_from_anchor) == (5e5, 1e-5, False)
    for layers, read in ((8, [2, 3, 4, 5, 6]), (32, [2, 9, 16, 23, 30]), (2, [1, 2])):
        assert config(SIZES | {"num_hidden_layers": layers}).trunk.aux_hidden_state_layer_ids == read
    assert HeadConfig.parse(made.model_dump(exclude_none=True)) == made
