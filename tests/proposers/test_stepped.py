"""Block verification keeps the target's distribution only with noise that no earlier step has read.

The rule of vLLM's kernel in PyTorch, with noise hashed from (seed, position); `tests/e2e/test_seeds.py` runs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.distributions import noise_floor, total_variation
from vllm_mtpc.proposers.v2.verification import step_seeds

VOCAB, DRAFTS, LENGTH, COUNT = 3, 3, 5, 200_000
DRAFTING, ACCEPTING, SAMPLING = range(3)  # streams of noise
# (a request's seeds [B], positions of the steps' first rows [B], number of the draft [B] or one) -> seeds of its noise
Key = Callable[[Tensor, Tensor, Tensor | int], Tensor]


def own(seeds: Tensor, anchor: Tensor, k: Tensor | int) -> Tensor:
    return seeds


def stepped(seeds: Tensor, anchor: Tensor, k: Tensor | int) -> Tensor:
    return step_seeds(seeds, anchor)


def numbered(seeds: Tensor, anchor: Tensor, k: Tensor | int) -> Tensor:
    """vLLM 0.33's `spec_step_seed`."""
    return seeds ^ (k << 32)


def both(seeds: Tensor, anchor: Tensor, k: Tensor | int) -> Tensor:
    return numbered(step_seeds(seeds, anchor), anchor, k)


# seeds of drafting, acceptance and resampling
SERVED = {"0.32": (stepped, stepped, stepped), "0.33": (stepped, numbered, own)}
BIASED = {
    "0.32 as it is": (own, own, own),
    "0.33 with a step's seeds everywhere": (both, both, stepped),
    "0.33 with drafts by position alone": (own, numbered, own),
}


def distributions() -> tuple[Tensor, Tensor]:
    """p and q [V, V] of the next token given the last; about half of the drafts are accepted."""
    generator = torch.Generator().manual_seed(4)
    tables = torch.randn(2, VOCAB, VOCAB, generator=generator, dtype=torch.float64) * 1.2
    return tables[0].softmax(-1), tables[1].softmax(-1)


def mixed(value: Tensor) -> Tensor:
    """splitmix64's finaliser on int64."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        value = (value ^ ((value >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return value


def uniform(seeds: Tensor, position: Tensor, stream: int, token: int = 0) -> Tensor:
    """In (0, 1), [B] float64: a hash of its arguments."""
    value = mixed(mixed(seeds) + position * 1_000_003 + stream * 7919 + token * 104_729)
    return ((mixed(value) >> 11) & ((1 << 53) - 1)).double().add(0.5) / (1 << 53)


def draw(distribution: Tensor, seeds: Tensor, position: Tensor, stream: int) -> Tensor:
    """Tokens [B] of distributions [B, V] (unnormalised), by Gumbel noise keyed as vLLM keys it."""
    noise = torch.stack([uniform(seeds, position, stream, token) for token in range(VOCAB)], dim=1)
    return (distribution.clamp(min=1e-300).log() - (-noise.log()).log()).argmax(dim=1)


def block_step(last: Tensor, anchor: Tensor, seeds: Tensor, keys: tuple[Key, Key, Key]) -> tuple[Tensor, Tensor]:
    """Tokens [B, K + 1] and number of valid ones [B] of a step after the tokens last [B] at positions anchor [B]."""
    (p, q), (drafting, accepting, sampling) = distributions(), keys
    tokens, before = [], last
    for k in range(DRAFTS):
        before = draw(q[before], drafting(seeds, anchor, k), anchor + k, DRAFTING)
        tokens.append(before)
    drafts = torch.stack(tokens, dim=1)
    given = torch.cat([last[:, None], drafts], dim=1)  # [B, K + 1], the token before each row
    ratio, ratios, accepted = torch.ones_like(anchor, dtype=torch.float64), [], torch.zeros_like(anchor)
    for k in range(DRAFTS):
        draft = drafts[:, k : k + 1]
        ratio = (ratio * (p[given[:, k]].gather(1, draft) / q[given[:, k]].gather(1, draft))[:, 0]).clamp(max=1)
        ratios.append(ratio)
        chance = ratio
        if k + 1 < DRAFTS:
            mass = (ratio[:, None] * p[given[:, k + 1]] - q[given[:, k + 1]]).clamp(min=0).sum(1)
            below = mass + 1 - ratio
            chance = torch.where(below > 0, mass / below, 1.0)
        u = uniform(accepting(seeds, anchor, k), anchor + k, ACCEPTING)
        accepted = torch.where(u <= chance, k + 1, accepted)
    scales = torch.stack([torch.ones_like(ratio), *ratios], dim=1).gather(1, accepted[:, None])  # [B, 1]
    row = given.gather(1, accepted[:, None])[:, 0]
    residual = (scales * p[row] - q[row]).clamp(min=0)
    distribution = torch.where((accepted == DRAFTS)[:, None], p[row], residual)
    final = draw(distribution, sampling(seeds, anchor, accepted), anchor + accepted, SAMPLING)
    out = torch.cat([drafts, final[:, None]], dim=1)
    return out.scatter(1, accepted[:, None], final[:, None]), accepted + 1


def decode(keys: tuple[Key, Key, Key]) -> list[list[int]]:
    """LENGTH tokens of COUNT requests after token 0 at position 1."""
    seeds = torch.randint(1 << 62, (COUNT,), generator=torch.Generator().manual_seed(1))
    text = torch.zeros(COUNT, 1 + LENGTH + DRAFTS + 1, dtype=torch.long)
    length = torch.ones(COUNT, dtype=torch.long)  # tokens so far, of which the last is not yet read
    while (length <= LENGTH).any():
        last = text.gather(1, length[:, None] - 1)[:, 0]
        tokens, count = block_step(last, length, seeds, keys)
        at = length[:, None] + torch.arange(DRAFTS + 1)
        valid = (torch.arange(DRAFTS + 1) < count[:, None]) & (at < text.shape[1]) & (length <= LENGTH)[:, None]
        at = at.clamp(max=text.shape[1] - 1)
        text.scatter_(1, at, torch.where(valid, tokens, text.gather(1, at)))
        length = torch.where(length <= LENGTH, length + count, length)
    return text[:, 1 : 1 + LENGTH].tolist()


@pytest.mark.parametrize("name", [*SERVED, *BIASED])
def test_fresh_noise_keeps_the_distribution(name: str) -> None:
    p, _ = distributions()
    outcomes = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    before = torch.nn.functional.pad(outcomes[:, :-1], (1, 0))
    distribution = p[before, outcomes].prod(dim=1).numpy()
    distance = total_variation(decode((SERVED | BIASED)[name]), distribution, VOCAB)
    floor = noise_floor(distribution, COUNT)
    print(f"{name}: TV {distance:.5f}, allowed {floor:.5f}")
    assert distance < floor if name in SERVED else distance > 2 * floor


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_seeds_of_different_steps_differ(seed: int) -> None:
    anchors = torch.cat([torch.arange(1, 5000), torch.tensor([2**20, 2**31 - 1])])
    found = step_seeds(torch.full_like(anchors, seed), anchors)
    assert found.dtype == torch.int64 and found.unique().numel() == anchors.numel()
    assert not (found == seed).any()  # steps without drafts use the request's own
