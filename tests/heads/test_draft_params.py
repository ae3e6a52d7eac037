"""The parameters of a draft against their definition; also from sharded and packed weights."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.heads_zoo import OPTIONS, B, N, V, build, hidden_states, read_by
from vllm_mtpc.circuits import CIRCUITS
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.head import DraftParams, Head
from vllm_mtpc.heads.leaves.own import Shard
from vllm_mtpc.kernels.draft import naive, probabilities
from vllm_mtpc.plan.draft_schedule import leaf_products

torch.set_num_threads(1)
FIRST = torch.tensor([0, V - 1, 3])
needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 products, so nothing is packed"
)


def defined(head: Head, hidden: Tensor, num_drafts: int) -> DraftParams:
    state, states = head.trunk(hidden, FIRST)
    logits = head.leaves(states, head.leaves.skip, num_drafts + 1).float()
    evidence = torch.zeros(B, head.circuit.num_components)
    # x_1 is given where the trunk has seen it, and one component cancels
    if not head.leaves.skip and head.circuit.num_components > 1:
        columns = FIRST if head.vocabulary is None else head.vocabulary.columns[FIRST]
        evidence = logits[:, 0].log_softmax(-1)[torch.arange(B), :, columns]
        evidence[columns < 0] = 0.0  # marginalised
    return DraftParams(evidence, logits[:, 1 - head.leaves.skip :], *head.sum_logits(state), FIRST)


def assert_same(found: DraftParams, wanted: DraftParams, **tolerance: float) -> None:
    assert found.bigram is wanted.bigram is None
    for name, one, other in zip(DraftParams._fields[:5], found[:5], wanted[:5], strict=True):
        torch.testing.assert_close(
            one.float(), other.float(), **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("circuit", CIRCUITS)
@pytest.mark.parametrize("num_drafts, ids", [(1, None), (N - 1, None), (N - 1, [0, 2, 3])])
def test_draft_params_equal_their_definition(name: str, circuit: str, num_drafts: int, ids: list[int] | None) -> None:
    head = build(name, circuit, std=0.3, ids=ids)
    hidden = read_by(head)
    found = head.draft_params(hidden, FIRST, num_drafts)
    assert found.evidence.dtype == torch.float32 and found.leaf.shape[:2] == (B, num_drafts)
    assert_same(found, defined(head, hidden, num_drafts))
    wanted = head.circuit.greedy(head(hidden, FIRST, num_drafts + 1), FIRST[:, None])[:, 1:]
    for draft in (naive.draft, probabilities.draft):
        drafts = draft(head.circuit.program, *found[:6], pick=lambda log_q, k: log_q.argmax(-1))
        assert torch.equal(drafts if ids is None else torch.tensor(ids)[drafts], wanted)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("circuit", CIRCUITS)
@pytest.mark.parametrize("num_drafts", [1, N - 1])
def test_token_conditioned_drafts_equal_greedy_decoding(name: str, circuit: str, num_drafts: int) -> None:
    head = build(name, circuit, std=0.5, token_rank=2)
    hidden = read_by(head, 8)
    head.leaves.token_target *= 20  # so that it decides drafts of every head
    first = torch.arange(8) % V
    given = head.draft_params(hidden, first, num_drafts)
    drafts = head.circuit.greedy(head(hidden, first, num_drafts + 1), first[:, None])[:, 1:]
    for draft in (naive.draft, probabilities.draft):
        assert torch.equal(draft(head.circuit.program, *given[:6], pick=lambda log_q, k: log_q.argmax(-1)), drafts)
    without = head.circuit.greedy(head(hidden, first, num_drafts + 1)._replace(bigram=None), first[:, None])[:, 1:]
    assert not torch.equal(drafts, without)


@needs_bfloat16
@pytest.mark.parametrize("name", ["linear", "mlp own"])
@pytest.mark.parametrize("ids", [None, [0, 2, 3]], ids=["all ids", "draft vocabulary"])
@pytest.mark.parametrize("circuit", ["ff", "cp", "btree"])
def test_packed_head_drafts_the_same(circuit: str, ids: list[int] | None, name: str) -> None:
    head, hidden = build(name, circuit, std=0.3, ids=ids).to(torch.bfloat16), hidden_states()
    wanted = [defined(head, hidden.bfloat16(), num_drafts) for num_drafts in (3, 2)]  # all that is packed, and less
    head.pack(4)
    assert head.leaves.leaf_weight is None and head.root_weight is None
    for num_drafts, params in zip((3, 2), wanted, strict=True):
        # logits of about 1 rounded to bfloat16, from sums in another order
        assert_same(head.draft_params(hidden, FIRST, num_drafts), params, rtol=1e-2, atol=1e-2)


def divided(head: Head, size: int) -> list[DraftParams]:
    """draft_params of every rank. Ranks run one after the other: twice, first to learn what each hands in."""
    handed_in: dict[int, Tensor] = {}

    def gather(rank: int, own: Tensor) -> Tensor:
        handed_in[rank] = own
        return torch.cat([handed_in.get(other, own) for other in range(size)])

    ranks = [copy.deepcopy(head) for _ in range(size)]
    for rank, part in enumerate(ranks):
        part.leaves.shard_leaves(Shard(rank, size, V, partial(gather, rank)))
    for _ in range(2):
        params = [part.draft_params(hidden_states(), FIRST, N - 1) for part in ranks]
    assert len({tuple(own.shape) for own in handed_in.values()}) == 1, "a gather takes equal sizes"
    return params


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])  # 7 tokens: 4 + 3, 3 + 3 + 1, 2 + 2 + 2 + 1, 2 + 2 + 2 + 1 + 0
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_draft_from_the_same_logits_as_one(size: int, dtype: torch.dtype) -> None:
    """A linear head; `tests/proposers/test_ranks.py` has the shared ones, on processes."""
    head = build("linear", std=0.3).to(dtype)
    parts, wanted = divided(head, size), head.draft_params(hidden_states(), FIRST, N - 1)
    for params in parts:
        assert params.leaf.shape == wanted.leaf.shape
        assert all(torch.equal(*pair) for pair in zip(params[:5], parts[0][:5], strict=True)), "ranks differ"
    # sums in another order; the evidence crosses in float32, so bfloat16 adds its rounding of the logits only
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert_same(parts[0], wanted, rtol=tolerance, atol=tolerance)


def test_gathered_evidence_is_not_rounded() -> None:
    """Numbers that bfloat16 cannot hold, next to logits that are bfloat16."""
    terms = torch.tensor([[[1.0001, 700.3], [-2.0003, -torch.inf]]])
    logits = torch.zeros(1, 2, 2, V, dtype=torch.bfloat16)
    evidence, whole = Shard(0, 1, V, lambda own: own).join(terms, logits)
    assert torch.equal(evidence, terms[:, 1] - terms[:, 0]) and torch.equal(whole, logits)


@pytest.mark.parametrize("rank, products", [(0, 8 * 128_256 * 4096), (16, 128_256 * 4096 + 8 * 16 * (4096 + 128_256))])
def test_leaf_products_of_default_schedules(rank: int, products: int) -> None:
    sizes = {"circuit": "btree", "window": 8, "num_components": 8}
    leaves = {"kind": "lm_head", "component_rank": rank}
    config = HeadConfig.create(
        **sizes,
        leaves=leaves,
        trunk={"kind": "none"},
        target={"hidden_size": 4096, "vocab_size": 128_256},
        verifier="x",
    )
    assert leaf_products(config) == products
