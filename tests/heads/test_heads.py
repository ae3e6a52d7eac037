"""The contract of every head: its function of the hidden state, its distribution, initialisation and training."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import log_softmax, logsumexp

from tests.support.circuit_checks import close
from tests.support.enumeration import Enumerated, all_tokens, prefix_marginals
from tests.support.heads_zoo import EMBEDDING, LM_HEAD, OPTIONS, B, N, R, V, build, hidden_states, read_by
from vllm_mtpc.circuits import CIRCUITS
from vllm_mtpc.circuits.base import CircuitParams
from vllm_mtpc.circuits.conditionals import conditionals
from vllm_mtpc.heads.head import Head
from vllm_mtpc.kernels.leaf import Bigram

torch.set_num_threads(1)
ALL = pytest.mark.parametrize("name", OPTIONS)
IDS = [0, 2, 3]  # a draft vocabulary


def defined_state(head: Head, h: torch.Tensor, first: int) -> torch.Tensor:
    """The state [D] of one hidden state [D] and x_1; of a trunk that computes states elsewhere they are h."""
    for mlp in getattr(head.trunk, "mlps", ()):
        parts = []
        for value, norm in ((h, mlp.state_norm), (EMBEDDING[first], mlp.first_norm)):
            parts.append(norm.weight * value / (value.square().mean() + 1e-6).sqrt())
        inner = mlp.in_proj.weight @ torch.cat(parts)
        gate, up = inner[: len(inner) // 2], inner[len(inner) // 2 :]
        h = h + mlp.out_proj.weight @ (gate / (1 + (-gate).exp()) * up)
    return h


def defined_logits(head: Head, state: torch.Tensor, k: int, z: int) -> torch.Tensor:
    """Logits [columns] of leaf k and component z at one state [D], as defined."""
    leaves = head.leaves
    if not leaves.needs_lm_head:
        return leaves.leaf_weight[k, z] @ state
    if leaves.options.expander_rank:
        own = 0 if leaves.component_rank else z
        state = state + leaves.up_weight[k, own] @ F.silu(leaves.down_weight[k] @ state)
    logits = (LM_HEAD[: head.vocab_size] if head.vocabulary is None else LM_HEAD[head.vocabulary.ids]) @ state
    return logits + (leaves.component_in[k, z] @ state) @ leaves.component_out[k] if leaves.component_rank else logits


def defined(head: Head, h: torch.Tensor, first: int) -> tuple[torch.Tensor, ...]:
    """Leaves [n - skip, r, columns], root [r] and inner [F, r, r] of one window, as defined."""
    n, r = head.leaves.num_leaves, head.circuit.num_components
    if h.dim() == 1:
        h = defined_state(head, h, first)[None].expand(head.circuit.window, -1)
    states, state = h[head.leaves.skip :], h[0]  # h: of a backbone [N, D]
    leaf = torch.stack([torch.stack([defined_logits(head, states[k], k, z) for z in range(r)]) for k in range(n)])
    root = head.root_weight @ state if head.circuit.has_root else torch.zeros(r)
    inner = torch.zeros(0, r, r)
    if head.circuit.num_inner:
        inner = torch.einsum("d,fzyd->fzy", state, head.inner_weight) + head.inner_bias
    return tuple(part.log_softmax(-1) for part in (leaf, root, inner))


@ALL
@pytest.mark.parametrize("ids", [None, IDS], ids=["all ids", "draft vocabulary"])
@pytest.mark.parametrize("circuit", CIRCUITS)
def test_leaves_and_sums_equal_their_definition(name, ids, circuit):
    head = build(name, circuit, std=0.3, ids=ids)
    hidden, first = read_by(head), torch.arange(B)
    params = head(hidden, first)
    assert params.leaf.shape == (B, N - head.leaves.skip, head.circuit.num_components, len(ids) if ids else V)
    for b in range(B):
        for part, wanted in zip(params[:3], defined(head, hidden[b], b), strict=False):
            # Other orders of summation over at most 64 terms of size about 1, three layers deep: float32 rounding.
            torch.testing.assert_close(part[b], wanted, rtol=1e-4, atol=1e-4)
    fewer = head(hidden, first, 3)
    torch.testing.assert_close(fewer.leaf, params.leaf[:, : 3 - head.leaves.skip])


def defined_tables(head: Head, h: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """log q of every window, [V] * n, and of x_2 .. x_n given x_1, by an enumeration of the latents for each x_1."""
    n, vocab, ids = head.circuit.window, head.vocab_size, list(range(head.vocab_size))
    ids = ids if head.vocabulary is None else head.vocabulary.ids.tolist()
    joint, given = [], []
    for first in range(vocab):
        leaf, root, inner = defined(head, h, first)
        whole = torch.full((n, leaf.shape[1], vocab), -torch.inf)
        whole[n - len(leaf) :, :, ids] = leaf
        bigram = None
        if head.leaves.token_rank:
            target = torch.zeros(n - 1, head.leaves.token_rank, vocab)
            target[..., ids] = head.leaves.token_target
            bigram = Bigram(head.leaves.token_source, target)

        params = CircuitParams(whole[None], root[None], inner[None], bigram)  # `whole` is written below
        if not head.leaves.skip:
            joint.append(Enumerated(head.circuit.name, params).table()[first])
        if head.leaves.skip or first not in ids:
            whole[0] = 0.0  # x_1 is known to the trunk, or marginalised
        rest = Enumerated(head.circuit.name, params).table()[first]
        given.append(rest - logsumexp(rest))
    return np.stack(joint or given), np.stack(given)


LEAVES = {"own": {}, "lm_head": {}, "lm_head low rank": {}, "own tokens": {"token_rank": 2}}
LEAVES["lm_head low rank tokens"] = {"token_rank": 2}
ZOO = {"own": ("linear", "mlp own"), "lm_head": ("shared", "mlp"), "lm_head low rank": ("low rank", "mlp low rank")}


@pytest.mark.parametrize("ids", [None, IDS[:2]], ids=["all ids", "draft vocabulary"])
@pytest.mark.parametrize("sees_first", [False, True])
@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("circuit", CIRCUITS)
def test_distribution_equals_enumeration(circuit, leaves, sees_first, ids):
    """Windows of all ids; an x_1 outside a draft vocabulary is marginalised."""
    n, vocab = 4, 3
    name = ZOO[leaves.removesuffix(" tokens")][sees_first]
    head, h = build(name, circuit, 2, n, vocab, std=0.3, ids=ids, **LEAVES[leaves]), hidden_states(1)[0]
    joint, given = defined_tables(head, h)
    tokens = all_tokens(n, vocab)
    params, skip = head(h.expand(len(tokens), -1), tokens[:, 0]), head.leaves.skip
    log_q = head.circuit.log_prob(params, tokens)
    close(log_q, joint.ravel())
    assert logsumexp(log_q.numpy()) == pytest.approx(np.log(vocab) * skip, abs=1e-5)
    columns, place = ids or list(range(vocab)), tuple(tokens.T.numpy())
    drafted = torch.isin(tokens[:, 1:], torch.tensor(columns)).all(1).numpy()  # later tokens outside are never drafted
    along, trained = head.circuit.conditional_log_probs(params, tokens), conditionals(head.circuit, params, tokens)
    state = head.circuit.start(params)
    for k in range(n):
        if k:
            wanted = log_softmax(prefix_marginals(given, k + 1)[place[:k]][drafted], axis=-1)
            close(along[drafted][:, k], wanted[np.arange(len(wanted)), place[k][drafted]])
            for log_q in (head.circuit.next_log_probs(params, state, k), trained[:, k - skip]):
                close(log_q[drafted], wanted[:, columns])
        state = head.circuit.observe(params, state, k, tokens[:, k])
    # Drafts after each x_1, the most probable ones and drawn ones.
    some = params.each(lambda part: part[:: vocab ** (n - 1)])
    first = torch.arange(vocab)[:, None]
    for drafts in (head.circuit.greedy(some, first), head.circuit.sample(some, first)):
        assert torch.equal(drafts[:, :1], first) and set(drafts[:, 1:].flatten().tolist()) <= {*columns}
    for row in head.circuit.greedy(some, first).tolist():
        for k in range(1, n):
            distribution = prefix_marginals(given, k + 1)[tuple(row[:k])]
            assert distribution[row[k]] >= distribution.max() - 1e-4  # float32 rounding


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name, plain", [("mlp", "shared"), ("mlp own", "linear")])
def test_untrained_mlp_gives_the_distribution_without_a_trunk(name, plain, layers):
    head, other = build(name, trunk={"layers": layers}), build(plain)
    for key, value in other.state_dict().items():
        head.state_dict()[key].copy_(value[1:] if key.startswith("leaves.") else value)
    assert len(head.trunk.mlps) == layers
    first = torch.arange(B)
    ours, theirs = head(hidden_states(), first), other(hidden_states(), first)
    assert torch.equal(ours.root, theirs.root) and torch.equal(ours.inner, theirs.inner)
    torch.testing.assert_close(ours.leaf, theirs.leaf[:, 1:])


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_are_float32_and_normalised_for_half_precision_weights(name, dtype):
    head = build(name, std=0.3).to(dtype)
    params = head(read_by(head).to(dtype), torch.arange(B))
    for part in params[:3]:
        assert part.dtype == torch.float32
        torch.testing.assert_close(part.exp().sum(-1), torch.ones(part.shape[:-1]), rtol=0, atol=5e-6)


@ALL
def test_training_fits_windows_and_moves_every_parameter(name):
    head = build(name).requires_grad_(True)
    before = copy.deepcopy(head.state_dict())
    tokens = torch.randint(0, V, (8, N), generator=torch.Generator().manual_seed(4))
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-2)
    for _ in range(150):
        hidden = read_by(head, 8)
        loss = -head.circuit.log_prob(head(hidden, tokens[:, 0]), tokens).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.1  # nats for five tokens; log 7 = 1.95 each by chance
    assert torch.equal(head.circuit.greedy(head(hidden, tokens[:, 0]), tokens[:, :1]), tokens)
    for key, value in head.state_dict().items():  # zeros at initialisation have a gradient too
        assert not torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", ["shared", "low rank", "mlp"])
def test_lm_head_leaves_start_at_the_target_distribution(name):
    head, hidden, first = build(name), hidden_states(), torch.arange(B)
    leaf, distribution = head(hidden, first).leaf, (hidden @ LM_HEAD.T).log_softmax(-1)[:, None, None]
    # A state moves by 0.01 * sqrt(4) * |silu| <= 0.1 per entry, 16 entries against weights of size 1: below 0.4. A
    # component adds two numbers near 1 times 0.01.
    assert (leaf - distribution).abs().max() < 0.5
    rows = leaf[0].flatten(0, 1)
    assert len({tuple(part.tolist()) for part in rows}) == len(rows) == head.leaves.num_leaves * R  # all different
    head.leaves.up_weight.zero_()
    if head.leaves.component_rank:
        head.leaves.component_out.zero_()
    torch.testing.assert_close(head(hidden, first).leaf, distribution.expand_as(leaf))
