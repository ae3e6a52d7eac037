"""Checks of every circuit, for the registered ones and the one of CONTRIBUTING.md."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, logsumexp

from tests.support import heads_zoo
from tests.support.enumeration import Enumerated, all_tokens, prefix_marginals, repeated
from tests.support.heads_zoo import V, hidden_states
from vllm_mtpc.circuits.base import Circuit, CircuitParams, evidence_of
from vllm_mtpc.circuits.conditionals import conditionals
from vllm_mtpc.heads.head import Head
from vllm_mtpc.heads.init import INHERITED_STAY, init_from_head
from vllm_mtpc.kernels.draft import naive, probabilities

Case = tuple[str, Circuit, CircuitParams]  # a circuit's name, the circuit, parameters of a batch of 2
# float32 keeps about 7 digits; log probabilities here stay above -40 and sum at most ~30 rounded terms.
TOLERANCE = 2e-5


def close(got: torch.Tensor, expected: np.ndarray | list) -> None:
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), np.asarray(expected), rtol=0, atol=TOLERANCE)


def check_enumeration(case: Case) -> None:
    """The joint; conditionals along sequences, in training, in drafts, and by start, next_log_probs and observe."""
    name, circuit, params = case
    vocab = params.leaf.shape[-1]
    tokens = all_tokens(circuit.window, vocab)
    both = circuit.conditional_log_probs(params, tokens[[1, -2]]).sum(dim=1)  # circuits of a batch are independent
    for b in range(2):
        table, many = Enumerated(name, params, b).table(), repeated(params, b, len(tokens))
        assert logsumexp(table) == pytest.approx(0, abs=1e-6)  # float32 inputs, each row normalised to ~1e-7
        close(circuit.log_prob(many, tokens), table.ravel())
        close(both[b], table.ravel()[(1, -2)[b]])
        along, state = circuit.conditional_log_probs(many, tokens), circuit.start(many)
        close(along.sum(dim=1), table.ravel())
        trained = conditionals(circuit, many, tokens)
        drafted = [draft_conditionals(draft, circuit, many, tokens) for draft in (naive.draft, probabilities.draft)]
        for k in range(circuit.window):
            distribution = log_softmax(prefix_marginals(table, k + 1), axis=-1)  # [V] * (k + 1)
            close(along[:, k], distribution[tuple(tokens[:, : k + 1].T.numpy())])
            expected = distribution[tuple(tokens[:, :k].T.numpy())]  # k = 0: one row for all
            found = [
                circuit.next_log_probs(many, state, k),
                trained[:, k],
                *([log_q[k - 1] for log_q in drafted] if k else []),
            ]
            for log_q in found:
                close(log_q, np.broadcast_to(expected, (len(tokens), vocab)))
            state = circuit.observe(many, state, k, tokens[:, k])


def draft_conditionals(
    draft: Callable[..., torch.Tensor], circuit: Circuit, params: CircuitParams, tokens: torch.Tensor
) -> list[torch.Tensor]:
    """What a function of `kernels.draft` draws the tokens after the first from, along tokens [B, n]."""
    found = []

    def follow(log_q: torch.Tensor, k: int) -> torch.Tensor:
        found.append(log_q)
        return tokens[:, k + 1]

    evidence = evidence_of(params.leaf[:, :1], tokens[:, :1])[:, 0]
    logits = params.leaf[:, 1:] + 0.5  # any constant
    draft(circuit.program, evidence, logits, params.root, params.inner, tokens[:, 0], params.bigram, pick=follow)
    return found


SMALL = 3  # vocabulary small enough to enumerate


def build(circuit: str, r: int, name: str = "linear", n: int = 4, vocab: int = V, **options) -> Head:
    return heads_zoo.build(name, circuit, r, n, vocab, **options)


def joint(head: Head) -> torch.Tensor:
    """log q of every window at one hidden state; an x_1 that the trunk has seen is uniform."""
    tokens = all_tokens(head.circuit.window, SMALL)
    log_q = head.circuit.log_prob(head(one_read_by(head, len(tokens)), tokens[:, 0]), tokens)
    return log_q - math.log(SMALL) * head.leaves.skip


def one_read_by(head: Head, count: int) -> torch.Tensor:
    """The input of a head for one context, `count` times: h [., D], or a state for each position [., n, D]."""
    hidden = hidden_states(1).expand(count, -1)
    return hidden[:, None].expand(-1, head.circuit.window, -1) if head.trunk.is_per_position else hidden


def check_growth_from_a_cp(name: str, circuit: str, n: int, sums: int) -> None:
    source, head = build("cp", 3, name, n, SMALL, std=0.3), build(circuit, 3, name, n, SMALL)
    assert head.circuit.num_inner == sums
    init_from_head(head, source)
    ours, theirs = joint(head), joint(source)
    kept = INHERITED_STAY**sums  # probability that no latent changes
    assert (ours - theirs).min() >= math.log(kept) - 1e-5  # float32 rounding of a log probability near -10
    variation = (ours.exp() - theirs.exp()).abs().sum() / 2
    assert 0 < variation <= 1 - kept + 1e-6
    # At the sums' ordinary start the same bound would be broken: the test can fail.
    fresh = build(circuit, 3, name, n, SMALL)
    head.inner_weight.copy_(fresh.inner_weight)
    head.inner_bias.copy_(fresh.inner_bias)
    assert (joint(head) - theirs).min() < math.log(kept) - 1e-5


def check_growth_from_an_ff(name: str, circuit: str) -> None:
    source, head = build("ff", 1, name, vocab=SMALL, std=0.3), build(circuit, 4, name, vocab=SMALL)
    init_from_head(head, source, seed=0)
    if f"leaves.{head.leaves.noise_in}" not in source.state_dict():  # new components are equal, and diverge in training
        torch.testing.assert_close(joint(head), joint(source), rtol=0, atol=2e-5)  # float32 rounding near -10
        return
    # Noise of std 0.01 D^-1/2 in the leaf parameters moves a logit by 0.01 and a window's by 0.05; a mean of four.
    assert (joint(head) - joint(source)).abs().max() < 0.15
    leaf = head(one_read_by(head, 1), torch.zeros(1, dtype=torch.long)).leaf[0]
    assert all(not torch.equal(leaf[:, 0], leaf[:, z]) for z in range(1, 4))
    before = joint(head)
    init_from_head(head, source, seed=1)
    assert not torch.equal(joint(head), before)
