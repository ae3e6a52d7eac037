"""Drafts within a support: the circuit whose leaves are truncated and renormalised; drafts picked from elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.enumeration import CIRCUITS, Enumerated, conditionals, make, random_params
from vllm_mtpc.circuits import CircuitParams
from vllm_mtpc.kernels.bigram import Bigram
from vllm_mtpc.kernels.draft import naive
from vllm_mtpc.kernels.support import Support

torch.set_num_threads(1)
B, N, R, V, M = 3, 4, 2, 6, 3


def made(name: str, seed: int = 1) -> tuple[CircuitParams, Support]:
    params = random_params(make(name, N, R), V, batch=B, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return params, Support(torch.rand(B, N - 1, V, generator=generator).argsort(-1)[..., :M], V)


def truncated(params: CircuitParams, support: Support) -> CircuitParams:
    """The definition: leaves of -inf beyond the support of drafts, renormalised."""
    inside = torch.zeros(B, N - 1, V, dtype=torch.bool).scatter(2, support.tokens, True)[:, :, None]
    drafted = params.leaf[:, 1:].masked_fill(~inside, -torch.inf).log_softmax(-1)
    return params._replace(leaf=torch.cat([params.leaf[:, :1], drafted], 1))


def drafted(name: str, params: CircuitParams, support: Support, first: Tensor, pick: naive.Pick) -> Tensor:
    """Drafts within the support, of logits there alone; these are off by a number of each leaf."""
    evidence = params.leaf[torch.arange(B), 0, :, first]
    r = params.leaf.shape[2]
    leaf = (
        params.leaf[:, 1:].gather(3, support.tokens[:, :, None].expand(-1, -1, r, -1))
        + torch.arange(1.0, r + 1)[:, None]
    )
    given = (evidence, leaf, params.root, params.inner, first, params.bigram, support)
    return naive.draft(make(name, N, R).program, *given, pick=pick)


@pytest.mark.parametrize("with_tokens", [False, True], ids=["", "token_rank"])
@pytest.mark.parametrize("name", CIRCUITS)
def test_conditionals_are_those_of_truncated_leaves(name: str, with_tokens: bool) -> None:
    params, support = made(name)
    if with_tokens:
        normal = torch.Generator().manual_seed(2)
        params = params._replace(bigram=Bigram(*(torch.randn(s, generator=normal) for s in ((V, 2), (N - 1, 2, V)))))
    first, seen = torch.tensor([0, V - 1, 2]), []

    def pick(log_q: Tensor, k: int) -> Tensor:
        seen.append(log_q)
        return torch.multinomial(log_q.exp(), 1, generator=torch.Generator().manual_seed(k))[:, 0]

    tokens = torch.cat([first[:, None], drafted(name, params, support, first, pick)], 1)
    for b in range(B):
        table = Enumerated(name, truncated(params, support), b).table()
        for k in range(N - 1):
            with np.errstate(divide="ignore", invalid="ignore"):
                wanted = conditionals(table, tuple(tokens[b, : k + 1].tolist()))
            np.testing.assert_allclose(seen[k][b].exp(), np.exp(wanted), atol=2e-6)  # float32
            assert (seen[k][b] > -torch.inf).sum() == M


def test_a_draft_from_elsewhere_tells_nothing_of_what_follows() -> None:
    """As a grammar may pick one: the next draft is that of the window with this position marginalised."""
    params, support = made("hmm")
    first, seen = torch.tensor([0, 1, 2]), []
    outside = torch.ones(B, V).scatter(1, support.tokens[:, 0], 0.0).argmax(1)

    def pick(log_q: Tensor, k: int) -> Tensor:
        seen.append(log_q)
        return outside if k == 0 else log_q.argmax(-1)

    drafted("hmm", params, support, first, pick)
    circuit, within = make("hmm", N, R), truncated(params, support)
    state = circuit.observe(within, circuit.start(within), 0, first)
    state = circuit.observe(within, state, 1, torch.full((B,), -1))
    torch.testing.assert_close(seen[1].exp(), circuit.next_log_probs(within, state, 2).exp())


def test_all_of_the_vocabulary_is_a_support_too() -> None:
    params, _ = made("btree")
    support = Support(torch.arange(V).flip(0).expand(B, N - 1, V), V)
    first, circuit = torch.tensor([3, 1, 2]), make("btree", N, R)
    tokens = drafted("btree", params, support, first, lambda log_q, k: log_q.argmax(-1))
    assert torch.equal(tokens, circuit.greedy(params, first[:, None])[:, 1:])
