"""Components by low-rank differences behind one row of the lm_head."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import circuit_checks
from tests.support.heads_zoo import LM_HEAD, B, D, N, R, V, build, hidden_states
from vllm_mtpc.circuits import CIRCUITS
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.base import DraftParams
from vllm_mtpc.heads.components import split
from vllm_mtpc.heads.init import init_from_head
from vllm_mtpc.kernels.draft import naive
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
    torch.testing.assert_close(split(base, states, a, b), wanted)


@ALL
def test_leaves_are_the_stated_function_of_the_hidden_state(circuit: str) -> None:
    head, hidden = build("shared", circuit, std=0.3, component_rank=RANK), hidden_states()
    assert head.up_weight.shape[1] == 1
    found = head(hidden).leaf
    for b, h in enumerate(hidden):
        for k in range(N):
            state = h + head.up_weight[k, 0] @ F.silu(head.down_weight[k] @ h)
            for z in range(head.circuit.num_components):
                logits = LM_HEAD @ state + head.component_out[k].T @ (head.component_in[k, z] @ state)
                # sums of 16 terms of size about 1 in another order: float32
                torch.testing.assert_close(found[b, k, z], logits.log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_of_full_rank_they_are_any_linear_head() -> None:
    """With rank V, B the identity and A the difference of unembeddings: W[k, z] = W + (W[k, z] - W)."""
    linear, head = build("linear", "hmm", std=0.3), build("shared", "hmm", component_rank=V)
    head.up_weight.zero_()
    head.component_in.copy_(linear.leaf_weight - LM_HEAD)
    head.component_out.copy_(torch.eye(V))
    torch.testing.assert_close(head(hidden_states()).leaf, linear(hidden_states()).leaf, rtol=1e-4, atol=1e-4)


def test_without_a_rank_a_head_is_what_it_was() -> None:
    ours, theirs = build("shared", component_rank=0), build("shared")
    assert set(ours.state_dict()) == set(theirs.state_dict()) and "component_rank" not in theirs.options
    assert torch.equal(ours(hidden_states()).leaf, theirs(hidden_states()).leaf)


def test_a_new_head_starts_near_the_targets_distribution_and_all_of_it_learns() -> None:
    head = build("shared", component_rank=RANK).requires_grad_(True)
    hidden, tokens = hidden_states(8), torch.randint(0, V, (8, N), generator=torch.Generator().manual_seed(4))
    distribution = (hidden @ LM_HEAD.T).log_softmax(-1)[:, None, None]
    assert (
        head(hidden).leaf - distribution
    ).abs().max() < 0.5  # as of the shared head, and two numbers near 1 times 0.01
    assert len({tuple(part.tolist()) for part in head(hidden).leaf[0].flatten(0, 1)}) == N * R  # told apart
    (-head.circuit.log_prob(head(hidden), tokens).mean()).backward()
    gradients = {name: value.grad.norm() for name, value in head.named_parameters()}
    assert all(gradients.values())
    # what multiplies numbers of the size of the state learns first, and at once
    assert gradients["component_out"] > 0.1 * gradients["up_weight"]
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-2)
    for _ in range(150):
        loss = -head.circuit.log_prob(head(hidden), tokens).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.1  # nats for five tokens; log 7 = 1.95 each by chance
    assert torch.equal(head.circuit.greedy(head(hidden), tokens[:, :1]), tokens)


def test_gradients_are_those_of_differences() -> None:
    head = build("shared", "cp", std=0.3, component_rank=RANK).double().requires_grad_(True)
    hidden = hidden_states(2).double()
    weights = torch.randn(2, N, R, V, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def value(component_in: torch.Tensor, component_out: torch.Tensor) -> torch.Tensor:
        given = {**dict(head.named_parameters()), "component_in": component_in, "component_out": component_out}
        leaves = torch.func.functional_call(
            _Logits(head), {f"head.{name}": part for name, part in given.items()}, hidden
        )
        return (leaves.log_softmax(-1) * weights).sum()

    assert torch.autograd.gradcheck(
        value, (head.component_in.detach().requires_grad_(), head.component_out.detach().requires_grad_())
    )


class _Logits(torch.nn.Module):
    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head.unembed(self.head.prepare(hidden), 0, N)  # in float64


# ---- drafts ------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("more", [{}, {"token_rank": 2}], ids=["", "token_rank"])
def test_drafts_are_those_of_the_circuit_they_come_from(circuit: str, more: dict[str, int]) -> None:
    head, hidden = build("shared", circuit, std=0.5, component_rank=RANK, **more), hidden_states()
    for num_drafts in (1, N - 1):
        params, seen = head.draft_params(hidden, FIRST, num_drafts), []
        assert params.leaf.shape == (B, num_drafts, head.circuit.num_components, V)

        def pick(log_q: torch.Tensor, k: int, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen.append(log_q)
            return log_q.argmax(-1)

        drafts = naive.draft(head.circuit.program, *params, pick=pick)
        whole = head(hidden, num_drafts + 1)
        state = head.circuit.observe(whole, head.circuit.start(whole), 0, FIRST)
        for k in range(num_drafts):
            wanted = head.circuit.next_log_probs(whole, state, k + 1)
            torch.testing.assert_close(seen[k].exp(), wanted.exp(), rtol=1e-4, atol=1e-5)
            state = head.circuit.observe(whole, state, k + 1, drafts[:, k])


def test_a_position_reads_one_row_of_the_lm_head() -> None:
    head, seen = build("shared", component_rank=RANK, bind=False), []
    head.bind_lm_head(lambda states: (seen.append(states.shape), states @ LM_HEAD.T)[1])
    head.draft_params(hidden_states(), FIRST, 2)
    assert seen == [(B, 3, 1, D)], "x_1 and the drafts"


def test_a_negative_rank_is_refused() -> None:
    with pytest.raises(HeadConfigError, match=r"component_rank.*greater than or equal to 0"):
        build("shared", component_rank=-1)


@pytest.mark.parametrize("size", [2, 3, 4])  # 7 tokens: 4 + 3, 3 + 3 + 1, 2 + 2 + 2 + 1
def test_a_rank_of_a_group_has_its_columns(size: int) -> None:
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


def test_one_component_becomes_some_that_say_the_same_and_can_part() -> None:
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


def test_more_components_repeat_their_own() -> None:
    given = {"name": "shared", "vocab": circuit_checks.SMALL, "component_rank": RANK}
    source, head = circuit_checks.build("hmm", 2, std=0.3, **given), circuit_checks.build("hmm", 6, **given)
    init_from_head(head, source)
    assert torch.equal(head.up_weight, source.up_weight) and torch.equal(head.component_out, source.component_out)
    assert 0 < (head.component_in - source.component_in.repeat(1, 3, 1, 1)).abs().max() < 0.1


def test_the_cost_that_default_schedules_reckon_with() -> None:
    from vllm_mtpc.proposers.config.schedule import leaf_products

    def products(**given: int) -> int:
        target = {"hidden_size": 4096, "vocab_size": 128_256}
        config = HeadConfig.create(
            circuit="btree", window=8, num_components=8, target=target, verifier="x", head="shared", **given
        )
        return leaf_products(config)

    row = 128_256 * 4096
    assert products() == 8 * row
    assert products(component_rank=16) == row + 8 * 16 * (4096 + 128_256)
