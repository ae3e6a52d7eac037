"""Components as low-rank differences over one row of the lm_head."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import circuit_checks
from tests.support.heads_zoo import LM_HEAD, N, V, build, hidden_states
from vllm_mtpc.circuits import CIRCUITS
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.base import DraftParams
from vllm_mtpc.heads.components import add_components
from vllm_mtpc.heads.init import init_from_head
from vllm_mtpc.kernels.shard import Shard

torch.set_num_threads(1)
SIZES = st.tuples(*(st.integers(1, most) for most in (3, 4, 3, 5, 4, 9)))  # B, k, r, R_c, D, V
RANK = 2
FIRST = torch.tensor([0, V - 1, 3])
ALL = pytest.mark.parametrize("circuit", CIRCUITS)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(SIZES, st.integers(0, 99))
def test_logits_are_the_base_and_a_low_rank_term(sizes: tuple[int, ...], seed: int) -> None:
    batch, k, r, c, d, v = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, k, v), (batch, k, d), (k, r, c, d), (k, c, v)
    base, states, a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    wanted = torch.einsum("bkd,kzcd,kcv->bkzv", states, a, b) + base[:, :, None]
    torch.testing.assert_close(add_components(base, states, a, b), wanted)


def test_components_of_full_rank_equal_a_linear_head() -> None:
    """With rank V, B the identity and A the difference of unembeddings: W[k, z] = W + (W[k, z] - W)."""
    linear, head = build("linear", "hmm", std=0.3), build("shared", "hmm", component_rank=V)
    head.up_weight.zero_()
    head.component_in.copy_(linear.leaf_weight - LM_HEAD)
    head.component_out.copy_(torch.eye(V))
    torch.testing.assert_close(head(hidden_states()).leaf, linear(hidden_states()).leaf, rtol=1e-4, atol=1e-4)


def test_rank_0_equals_a_head_without_components() -> None:
    ours, theirs = build("shared", component_rank=0), build("shared")
    assert set(ours.state_dict()) == set(theirs.state_dict()) and "component_rank" not in theirs.options
    assert torch.equal(ours(hidden_states()).leaf, theirs(hidden_states()).leaf)


def test_a_negative_rank_is_refused() -> None:
    with pytest.raises(HeadConfigError, match=r"component_rank.*greater than or equal to 0"):
        build("shared", component_rank=-1)


@pytest.mark.parametrize("size", [2, 3, 4])  # 7 tokens: 4 + 3, 3 + 3 + 1, 2 + 2 + 2 + 1
def test_tensor_parallel_rank_has_its_columns(size: int) -> None:
    head, hidden, handed_in = build("shared", std=0.3, component_rank=RANK), hidden_states(), {}
    wanted = head.draft_params(hidden, FIRST, N - 1)

    def gather(rank: int, own: torch.Tensor) -> torch.Tensor:
        handed_in[rank] = own
        return torch.cat([handed_in.get(other, own) for other in range(size)])

    def of(rank: int) -> DraftParams:
        part, shard = copy.deepcopy(head), Shard(rank, size, V, partial(gather, rank))
        own = F.pad(LM_HEAD[shard.start : shard.stop], (0, 0, 0, shard.rows - (shard.stop - shard.start)))
        part.bind_lm_head(lambda states: states @ own.T, shard)
        assert part.component_out.shape == (N, RANK, shard.rows)
        return part.draft_params(hidden, FIRST, N - 1)

    for _ in range(2):  # ranks run one after the other: twice, first to learn what each hands in
        parts = [of(rank) for rank in range(size)]
    whole = torch.cat([part.leaf for part in parts], -1)[..., :V]
    torch.testing.assert_close(whole, wanted.leaf, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts[0].evidence, wanted.evidence, rtol=1e-5, atol=1e-5)


# ---- where training starts ---------------------------------------------------------------------------


def test_one_component_becomes_equal_ones_that_diverge() -> None:
    source = circuit_checks.build("ff", 1, "shared", vocab=circuit_checks.SMALL, std=0.3)
    head = circuit_checks.build("btree", 4, "shared", vocab=circuit_checks.SMALL, component_rank=RANK)
    init_from_head(head, source)
    # float32 rounding of a log probability near -10
    torch.testing.assert_close(circuit_checks.joint(head), circuit_checks.joint(source), rtol=0, atol=1e-5)
    head.requires_grad_(True)
    tokens = torch.zeros(1, head.circuit.window, dtype=torch.long)
    (-head.circuit.log_prob(head(hidden_states(1)), tokens).mean()).backward()
    head.requires_grad_(False).component_out.sub_(head.component_out.grad)
    leaf = head(hidden_states(1)).leaf[0]
    assert all(not torch.equal(leaf[:, 0], leaf[:, z]) for z in range(1, 4))


@pytest.mark.parametrize("theirs", [{"component_rank": RANK + 1}, {}])
def test_another_rank_is_refused(theirs: dict[str, int]) -> None:
    given = {"name": "shared", "circuit": "cp"}
    with pytest.raises(HeadConfigError, match=f"component_rank={RANK}"):
        init_from_head(build(**given, component_rank=RANK), build(**given, **theirs))


def test_more_components_repeat_component_in() -> None:
    given = {"name": "shared", "vocab": circuit_checks.SMALL, "component_rank": RANK}
    source, head = circuit_checks.build("hmm", 2, std=0.3, **given), circuit_checks.build("hmm", 6, **given)
    init_from_head(head, source)
    assert torch.equal(head.up_weight, source.up_weight) and torch.equal(head.component_out, source.component_out)
    assert 0 < (head.component_in - source.component_in.repeat(1, 3, 1, 1)).abs().max() < 0.1


def test_leaf_products_of_default_schedules() -> None:
    from vllm_mtpc.plan.draft_schedule import leaf_products

    def products(**given: int) -> int:
        target = {"hidden_size": 4096, "vocab_size": 128_256}
        config = HeadConfig.create(
            circuit="btree", window=8, num_components=8, target=target, verifier="x", head="shared", **given
        )
        return leaf_products(config)

    row = 128_256 * 4096
    assert products() == 8 * row
    assert products(component_rank=16) == row + 8 * 16 * (4096 + 128_256)
