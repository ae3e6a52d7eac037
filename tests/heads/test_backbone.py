"""A backbone's states against a definition of one window at a time, without batches, caches or torch's attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.drafters import draft_states
from tests.support.heads_zoo import EMBEDDING, D, V, build
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads import backbone
from vllm_mtpc.heads.backbone import BackboneHead

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


def head_of(from_anchor: bool = False) -> BackboneHead:
    return build("backbone", "hmm", std=0.3, sample_from_anchor=from_anchor).double()


def read(head: BackboneHead, aux: Tensor = AUX, first: Tensor = FIRST) -> Tensor:
    return head.read(head.context(aux, POSITION, DOCUMENT), ROW, START, first)


def slow(head: BackboneHead) -> Tensor:
    """States [windows, n, D], one window after the other."""
    weights, found, steps = dict(head.backbone.named_parameters()), [], torch.arange(5 - head.from_anchor)
    for row, start, first in zip(ROW.tolist(), START.tolist(), FIRST.tolist(), strict=True):
        seen = (DOCUMENT[row] == DOCUMENT[row, start]) & (torch.arange(S) <= start)
        queries = torch.stack([EMBEDDING[first].double(), *[head.backbone.mask_embedding] * (len(steps) - 1)])
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
    names = [name for name, _ in head.named_parameters() if name.startswith("backbone.")]
    parameters = [head.get_parameter(name) for name in names]
    found, wanted = (torch.autograd.grad((states * weight).sum(), parameters) for states in (read(head), slow(head)))
    for name, one, other in zip(names, found, wanted, strict=True):
        assert other.abs().max() > 1e-3, name
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def leaks(head: BackboneHead) -> list[str]:
    """The inputs that change a window's states and must not: later tokens, other documents, other windows."""
    before, found = read(head), []
    for row, start in set(zip(ROW.tolist(), START.tolist(), strict=True)):
        unseen = torch.ones(2, S, dtype=torch.bool)
        unseen[row, : start + 1] = DOCUMENT[row, : start + 1] != DOCUMENT[row, start]
        changed = torch.where(unseen[..., None], AUX + 1, AUX)
        own = (row == ROW) & (start == START)
        if not torch.equal(read(head, changed)[own], before[own]):
            found.append(f"text unseen by {row}, {start}")
    for window in range(len(ROW)):
        first = (FIRST + 1) % V
        first[window] = FIRST[window]
        if not torch.equal(read(head, first=first)[window], before[window]):
            found.append(f"windows next to {window}")
    return found


def test_window_does_not_read_other_text(monkeypatch):
    monkeypatch.setattr(backbone, "CONTEXT_PER_QUERY", 1)  # windows next to one another
    head, right = head_of(), backbone.windows_mask
    assert leaks(head) == []

    def future(starts: Tensor, document: Tensor, num_queries: int) -> Tensor:
        return right((starts + 1).clamp(max=document.shape[1] - 1), document, num_queries)

    def documents(starts: Tensor, document: Tensor, num_queries: int) -> Tensor:
        return right(starts, torch.zeros_like(document), num_queries)

    def windows(starts: Tensor, document: Tensor, num_queries: int) -> Tensor:
        mask = right(starts, document, num_queries).clone()
        mask[..., document.shape[1] :] = True
        return mask

    for wrong, words in ((future, "text unseen"), (documents, "text unseen"), (windows, "windows next to")):
        monkeypatch.setattr(backbone, "windows_mask", wrong)
        assert any(words in one for one in leaks(head)), wrong.__name__


def test_leaf_of_x_1_is_equal_for_all_components():
    head = head_of()
    states = read(head)
    params = head(states)
    torch.testing.assert_close(params.leaf[:, 0], torch.full_like(params.leaf[:, 0], -math.log(V)))
    drafted = head.draft_params(states, FIRST, 3)
    assert not drafted.evidence.any() and drafted.leaf.shape[1] == 3
    torch.testing.assert_close(drafted.leaf.float().log_softmax(-1), params.leaf[:, 1:4])


def test_anchor_layout_reads_each_leaf_one_query_earlier():
    """Its leaves of positions 2 to n are the other layout's for the same states, moved by one."""
    head, other = head_of(True), head_of(False)
    other.load_state_dict(head.state_dict())
    states = torch.randn(3, 5, D, dtype=torch.float64)
    ours, theirs = head(states[:, 1:]), other(states)
    torch.testing.assert_close(ours.leaf, theirs.leaf)


def test_backbone_without_embeddings_is_refused():
    with pytest.raises(HeadConfigError, match="bind_embedding"):
        read(build("backbone", "hmm", bind=False).double())
    with pytest.raises(HeadConfigError, match="bind_lm_head"):
        build("backbone", "hmm", bind=False)(torch.zeros(1, 5, D))


SIZES = {"hidden_size": 32, "vocab_size": 9, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 48}
SIZES |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 5e5}}


def config(target: dict = SIZES, **options) -> HeadConfig:
    sizes = {"circuit": "cp", "window": 4, "num_components": 2, "verifier": "../target", "component_rank": 3}
    return HeadConfig.create(**sizes | options, target=target, head="backbone")


def test_default_sizes_are_those_of_the_target():
    made = config()
    assert (made.backbone_heads, made.backbone_kv_heads, made.backbone_head_dim) == (4, 2, 8)
    assert (made.backbone_width, made.backbone_theta, made.backbone_eps) == (48, 5e5, 1e-5)
    assert made.aux_hidden_state_layer_ids == [2, 3, 4, 5, 6] and made.sample_from_anchor is False
    assert config(SIZES | {"num_hidden_layers": 32}).aux_hidden_state_layer_ids == [2, 9, 16, 23, 30]
    assert config(SIZES | {"num_hidden_layers": 2}).aux_hidden_state_layer_ids == [1, 2]
    assert HeadConfig.parse(made.model_dump(exclude_none=True)) == made


@pytest.mark.parametrize(
    "options, words",
    [
        ({"component_rank": 0}, ["num_components=2 needs component_rank"]),
        ({"backbone_layers": 6}, ["backbone_layers", "6", "5"]),
        ({"backbone_kv_heads": 3}, ["backbone_kv_heads=3 does not divide backbone_heads=4"]),
        ({"backbone_head_dim": 7}, ["backbone_head_dim=7", "even"]),
        ({"aux_hidden_state_layer_ids": [3, 2]}, ["[3, 2]", "rising numbers from 0 to 8"]),
        ({"aux_hidden_state_layer_ids": [9]}, ["[9]", "rising numbers from 0 to 8"]),
        ({"aux_hidden_state_layer_ids": []}, ["aux_hidden_state_layer_ids", "1 item"]),
        ({"lora_layers": 1}, ["lora_layers=1 with head 'backbone'", "set lora_layers to 0"]),
    ],
)
def test_impossible_backbone_options_are_refused(options, words):
    with pytest.raises(HeadConfigError) as caught:
        config(**options)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), caught.value
