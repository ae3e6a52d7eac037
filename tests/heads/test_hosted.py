"""Heads on the states of a drafter: leaves and, of a product, sums against their definition and enumeration."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from vllm_mtpc.circuits import CircuitParams
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import HOSTED, build_head
from vllm_mtpc.heads.hosted import HostedHead
from vllm_mtpc.kernels.shard import Shard

torch.set_num_threads(1)
D, V, N, R, RANK = 6, 4, 5, 3, 2
torch.manual_seed(0)
LM_HEAD = nn.Linear(D, V, bias=False).requires_grad_(False)
FIRST = torch.tensor([0, 3])
STATES = torch.randn(len(FIRST), N - 1, D, generator=torch.Generator().manual_seed(0))  # of a drafter of blocks
TEXTS = torch.tensor(list(product(range(V), repeat=N - 1)))  # every x_2 .. x_n


def make(kind: str, circuit: str = "hmm", token_rank: int = 0, std: float = 1.0) -> HostedHead:
    """A head with random parameters; std 0: as it is initialised."""
    torch.manual_seed(0)
    r, rank = (1, 0) if circuit == "ff" else (R, RANK)
    sizes = {"num_components": r, "component_rank": rank, "token_rank": token_rank, "expander_rank": 4}
    target, drafter = {"vocab_size": V, "hidden_size": D}, {"method": "mtp"}
    head = build_head(
        HeadConfig.create(head=kind, circuit=circuit, window=N, target=target, verifier="-", drafter=drafter, **sizes)
    )
    head.bind_lm_head(LM_HEAD)
    if std:
        for weight in head.parameters():
            nn.init.normal_(weight, std=std)
    return head.requires_grad_(False)


@pytest.mark.parametrize("kind", HOSTED)
@pytest.mark.parametrize("circuit", ["ff", "cp", "hmm", "btree"])
@pytest.mark.parametrize("states", [STATES, STATES[:, :1]], ids=["block", "one state"])
@pytest.mark.parametrize("token_rank", [0, 2])
def test_untrained_marginals_are_the_drafters(kind: str, circuit: str, states: Tensor, token_rank: int) -> None:
    leaf = make(kind, circuit, token_rank, std=0)(states).leaf
    wanted = LM_HEAD(states.expand(-1, N - 1, -1)).log_softmax(-1)[:, :, None].expand_as(leaf[:, 1:])
    torch.testing.assert_close(leaf[:, 1:], wanted)
    assert leaf[:, 0].unique().numel() == 1  # the latent does not depend on x_1


def test_leaves_of_one_state_are_as_defined() -> None:
    head, state = make("hosted", std=0.3), STATES[:, 0]
    leaf = head(state).leaf
    assert torch.equal(leaf, head(state[:, None]).leaf)
    for k in range(1, N):
        moved = state + nn.functional.silu(state @ head.down_weight[k - 1].T) @ head.up_weight[k - 1].T
        for z in range(R):
            logits = LM_HEAD(moved) + moved @ head.component_in[k, z].T @ head.component_out[k]
            torch.testing.assert_close(leaf[:, k, z], logits.log_softmax(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", HOSTED)
@pytest.mark.parametrize("token_rank", [0, 2])
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("drafts", [N - 1, 2])
def test_draft_params_are_those_of_training(kind: str, token_rank: int, in_blocks: bool, drafts: int) -> None:
    head = make(kind, token_rank=token_rank)
    params, whole = head.draft_params(STATES, FIRST, drafts, in_blocks), head(STATES, 1 + drafts)
    leaf = params.leaf if params.low is None else params.low.leaves(params.leaf)
    torch.testing.assert_close(leaf.log_softmax(-1), whole.leaf[:, 1:])
    torch.testing.assert_close(params.root.log_softmax(-1), whole.root)
    torch.testing.assert_close(params.inner.log_softmax(-1), whole.inner, rtol=1e-4, atol=1e-5)
    assert params.evidence is not None and not params.evidence.any()


def defined(head: HostedHead, states: Tensor, tokens: Tensor) -> Tensor:
    """log q [B, T] of tokens [T, K] by the definition: PC times the drafter's distributions, over their sum."""
    factors = LM_HEAD(head.states(states, 1, 1 + tokens.shape[1]))[:, :, 0].log_softmax(-1)  # [B, K, V]
    leaf = (head.component_in[1:] @ head.component_out[1:])[: tokens.shape[1]]  # [K, r, V], not normalised
    root, inner = (part.log_softmax(-1) for part in head.sum_logits(states))
    leaf = torch.cat([torch.zeros(1, R, V), leaf])  # of x_1, too
    windows, found = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1), []
    for index in range(len(states)):
        circuit = CircuitParams(leaf[None], root[index, None], inner[index, None])
        circuit = circuit.each(lambda part: part.expand(len(tokens), *part.shape[1:]))
        factor = factors[index].expand(len(tokens), -1, -1).gather(2, tokens[..., None])[..., 0].sum(1)
        found.append((head.circuit.log_prob(circuit, windows) + factor).log_softmax(0))
    return torch.stack(found)


def log_prob(head: HostedHead, params: CircuitParams, index: int, tokens: Tensor) -> Tensor:
    """log q [T] of tokens [T, K] after x_1 of request `index`, by the head's circuit."""
    windows = torch.cat([FIRST[index].expand(len(tokens), 1), tokens], 1)
    repeated = params.each(lambda part: part[index, None].expand(len(tokens), *part.shape[1:]))
    return head.circuit.conditional_log_probs(repeated, windows)[:, 1:].sum(1)


@pytest.mark.parametrize("circuit", ["cp", "hmm", "btree"])
@pytest.mark.parametrize("drafts", [N - 1, 2])
def test_product_is_exact(circuit: str, drafts: int) -> None:
    """Without the normalisers in the sums, an injected fault, the conditionals are another distribution's."""
    head, states = make("product", circuit), STATES[:, :1]
    params, tokens = head(states, 1 + drafts), TEXTS[:: V ** (N - 1 - drafts), :drafts]
    wanted = defined(head, states, tokens)
    for index in range(len(FIRST)):
        found = log_prob(head, params, index, tokens)
        torch.testing.assert_close(found, wanted[index], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.logsumexp(0).exp(), torch.tensor(1.0))
    root, inner = (part.log_softmax(-1) for part in head.sum_logits(states))
    faulty = log_prob(head, params._replace(root=root, inner=inner), 0, tokens)
    assert (faulty.exp() - wanted[0].exp()).abs().sum() / 2 > 0.05


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_ranks_are_those_of_one(in_blocks: bool, size: int) -> None:
    wanted = make("product").draft_params(STATES, FIRST, N - 1, in_blocks)
    rows, handed_in = -(-V // size), []

    def logits(rank: int) -> Callable[[Tensor], Tensor]:
        return lambda x: nn.functional.pad(LM_HEAD(x), (0, rows * size - V)).unflatten(-1, (size, rows))[..., rank, :]

    def draft(rank: int, gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        part = make("product")
        part.bind_lm_head(logits(rank), Shard(rank, size, V, gather))
        params = part.draft_params(STATES, FIRST, N - 1, in_blocks)
        return params.root, params.inner

    for rank in range(size):
        draft(rank, lambda x: handed_in.append(x) or x.repeat(size, 1))
    for rank in range(size):
        found = draft(rank, lambda x: torch.cat(handed_in))
        torch.testing.assert_close(found, (wanted.root, wanted.inner), rtol=1e-4, atol=1e-5)
