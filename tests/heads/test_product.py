"""The product of a drafter's distributions and a circuit, against enumeration of its definition."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from vllm_mtpc.circuits import CircuitParams
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.product import ProductHead
from vllm_mtpc.kernels.shard import Shard

torch.set_num_threads(1)
D, V, N, R, RANK = 6, 4, 5, 3, 2
LM_HEAD = nn.Linear(D, V, bias=False).requires_grad_(False)
FIRST = torch.tensor([0, 3])
TEXTS = torch.tensor(list(product(range(V), repeat=N - 1)))  # every x_2 .. x_n


def make(circuit: str = "hmm", token_rank: int = 0, std: float = 1.0) -> tuple[ProductHead, Tensor]:
    """A head with random parameters, and states of its drafter."""
    torch.manual_seed(0)
    sizes = {"num_components": R, "component_rank": RANK, "token_rank": token_rank, "expander_rank": 4}
    target = {"vocab_size": V, "hidden_size": D}
    given = {"head": "product", "circuit": circuit, "window": N, "target": target, "verifier": "-"}
    head = build_head(HeadConfig.create(**given, **sizes, drafter={"method": "mtp"}))
    head.bind_lm_head(LM_HEAD)
    if std:
        for weight in head.parameters():
            nn.init.normal_(weight, std=std)
    return head.requires_grad_(False), torch.randn(len(FIRST), 1, D)


def defined(head: ProductHead, states: Tensor, tokens: Tensor) -> Tensor:
    """log q [B, T] of tokens [T, K] by the definition: PC times the drafter's distributions, over their sum."""
    factors = LM_HEAD(head.states(states, 1, 1 + tokens.shape[1]))[:, :, 0].log_softmax(-1)  # [B, K, V]
    leaf = (head.component_in[1:] @ head.component_out[1:])[: tokens.shape[1]]  # [K, r, V], not normalised
    root, inner = (part.log_softmax(-1) for part in head.sum_logits(states))
    leaf = torch.cat([torch.zeros(1, R, V), leaf])  # of x_1, too
    windows, found = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1), []
    for index in range(len(states)):
        circuit = CircuitParams(leaf[None], root[index, None], inner[index, None])
        circuit = circuit.each(lambda part: part.expand(len(tokens), *part.shape[1:]))
        own = factors[index].expand(len(tokens), -1, -1).gather(2, tokens[..., None])[..., 0].sum(1)
        found.append((head.circuit.log_prob(circuit, windows) + own).log_softmax(0))
    return torch.stack(found)


@pytest.mark.parametrize("circuit", ["cp", "hmm", "btree"])
@pytest.mark.parametrize("drafts", [N - 1, 2])
def test_product_is_exact(circuit: str, drafts: int) -> None:
    head, states = make(circuit)
    params, tokens = head(states, 1 + drafts), TEXTS[:: V ** (N - 1 - drafts), :drafts]
    wanted = defined(head, states, tokens)
    for index, first in enumerate(FIRST):
        windows = torch.cat([first.expand(len(tokens), 1), tokens], 1)
        own = params.each(lambda part, at=index: part[at, None].expand(len(tokens), *part.shape[1:]))
        found = head.circuit.conditional_log_probs(own, windows)[:, 1:].sum(1)
        torch.testing.assert_close(found, wanted[index], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.logsumexp(0).exp(), torch.tensor(1.0))


def test_normalisers_in_the_sums_are_needed() -> None:
    """The injected fault: without the upward pass the conditionals are another distribution's."""
    head, states = make()
    params, (root, inner) = head(states), head.sum_logits(states)
    wrong = params._replace(root=root.log_softmax(-1), inner=inner.log_softmax(-1))
    windows = torch.cat([FIRST[:1].expand(len(TEXTS), 1), TEXTS], 1)
    own = wrong.each(lambda part: part[:1].expand(len(TEXTS), *part.shape[1:]))
    found = head.circuit.conditional_log_probs(own, windows)[:, 1:].sum(1)
    assert (found.exp() - defined(head, states, TEXTS)[0].exp()).abs().sum() / 2 > 0.05


@pytest.mark.parametrize("token_rank", [0, 2])
def test_untrained_product_is_the_drafter(token_rank: int) -> None:
    head, states = make(token_rank=token_rank, std=0)
    leaf = head(states).leaf[:, 1:]
    torch.testing.assert_close(leaf, LM_HEAD(states).log_softmax(-1)[:, :, None].expand_as(leaf))


@pytest.mark.parametrize("token_rank", [0, 2])
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("drafts", [N - 1, 2])
def test_draft_params_are_those_of_training(token_rank: int, in_blocks: bool, drafts: int) -> None:
    head, states = make(token_rank=token_rank)
    params, whole = head.draft_params(states, FIRST, drafts, in_blocks), head(states, 1 + drafts)
    leaf = params.leaf if params.low is None else params.low.leaves(params.leaf)
    torch.testing.assert_close(leaf.log_softmax(-1), whole.leaf[:, 1:])
    torch.testing.assert_close(params.root, whole.root)
    torch.testing.assert_close(params.inner, whole.inner, rtol=1e-4, atol=1e-5)
    assert params.evidence is not None and not params.evidence.any()


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_ranks_are_those_of_one(in_blocks: bool, size: int) -> None:
    head, states = make()
    wanted = head.draft_params(states, FIRST, N - 1, in_blocks)
    rows, own = -(-V // size), []

    def logits(rank: int) -> Callable[[Tensor], Tensor]:
        return lambda x: nn.functional.pad(LM_HEAD(x), (0, rows * size - V)).unflatten(-1, (size, rows))[..., rank, :]

    for rank in range(size):
        part, _ = make()
        part.bind_lm_head(logits(rank), Shard(rank, size, V, lambda x: own.append(x) or x.repeat(size, 1)))
        part.draft_params(states, FIRST, N - 1, in_blocks)
    for rank in range(size):
        part, _ = make()
        part.bind_lm_head(logits(rank), Shard(rank, size, V, lambda x: torch.cat(own)))
        found = part.draft_params(states, FIRST, N - 1, in_blocks)
        torch.testing.assert_close((found.root, found.inner), (wanted.root, wanted.inner), rtol=1e-4, atol=1e-5)
