"""Verification on Model Runner V1 on a CPU: by rejection, and by coupling for requests with a seed.

Rejection (Leviathan et al., 2023): a draft x is accepted with probability p(x) / q(x); the token in the place of the
first one that is not is drawn from the normalised max(p - q, 0). vLLM draws an exponential number for every id of every
request, which on a CPU is the largest part of sampling; here one number selects the token by its cumulative mass.

Coupling (see `proposers/v2/verification.py`): vLLM's sampler on a CPU derives a token's Gumbel noise from one number of
the request's generator. Drafts and the target's tokens at their rows are sampled with the same numbers, drawn ahead. On
other devices a seed guarantees only the distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor
from vllm.v1.sample import rejection_sampler

from vllm_mtpc.kernels.pick.naive import of_mass
from vllm_mtpc.proposers.v1.proposer import draw_numbers, sample_tokens

NONE = -1  # no token, in vLLM's output


def rejection_sample(
    drafts: Tensor,
    num_drafts: list[int],
    width: int,
    ends: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    bonus: Tensor,
    sampling_metadata: Any,
) -> Tensor:
    """Return tokens [B, width + 1] int32, NONE after the last one, of B requests and their T drafts in a row.

    Args:
        drafts: [T] int32.
        num_drafts: of each request; width: the most.
        ends: [B], end of each request's drafts.
        draft_probs: [T, V], q; None: drafts are certain.
        target_logits: [T, V] float32, processed.
        bonus: [B, 1], the token after the last draft.
        sampling_metadata: vLLM's; a request of temperature 0 has the argmax.
    """
    counts, drafts = torch.tensor(num_drafts), drafts.long()
    begins = ends.long() - counts
    request = torch.arange(len(counts)).repeat_interleave(counts)  # [T]
    position = torch.arange(len(drafts)) - begins[request]
    probs, at = target_logits.softmax(-1), drafts.clamp(min=0)[:, None]
    sizes = counts + (counts > 0)  # of each request's numbers: one per draft, and one for the token after them
    generators, first = sampling_metadata.generators, sizes.cumsum(0) - sizes
    u = rejection_sampler.generate_uniform_probs(int(sizes.sum()), sizes.tolist(), generators, probs.device)
    p = probs.gather(1, at)[:, 0].double()
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(1, at)[:, 0].double()
    is_accepted = (drafts >= 0) & (q > 0) & (u[first[request] + position] * q <= p)
    is_greedy = sampling_metadata.temperature == 0  # [B]
    has_greedy, rows = bool(is_greedy.any()), is_greedy[request]
    if has_greedy:
        is_accepted[rows] = drafts[rows] == target_logits[rows].argmax(-1)
    grid = torch.zeros(len(counts), width + 1, dtype=torch.bool)
    grid[request, position] = is_accepted
    kept = grid.long().cumprod(1).sum(1)  # [B], leading accepted drafts
    at_end, rejected = bonus[:, 0].to(torch.int32, copy=True), (kept < counts).nonzero()[:, 0]
    rows = (begins + kept)[rejected]
    drafted = drafts[rows] if draft_probs is None else draft_probs[rows]
    found = draw_rest(probs[rows], drafted, u[(first + counts)[rejected]])
    if has_greedy:
        found = torch.where(is_greedy[rejected], target_logits[rows].argmax(-1), found)
    at_end[rejected] = found.int()
    tokens = torch.full((len(counts), width + 1), NONE, dtype=torch.int32)
    tokens[request, position] = drafts.int()
    columns = torch.arange(width + 1)
    return tokens.where(columns < kept[:, None], NONE).where(columns != kept[:, None], at_end[:, None])


def draw_rest(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """Return tokens [R] from max(p - q, 0) by u [R], for p [R, V], and q [R, V] or certain drafts [R] (-1: none)."""
    if q.dim() == 2:
        rest = (p - q).clamp_(min=0)
    else:
        rest = p.scatter(1, q.clamp(min=0)[:, None], torch.where(q < 0, p[:, 0], 0.0)[:, None])
    return of_mass(torch.where(rest.any(-1, keepdim=True), rest, p), u)  # nothing is left by rounding alone


@contextmanager
def verify_here(generators: dict[int, Generator], num_drafts: list[int]) -> Iterator[None]:
    """While a batch is verified, sample by `rejection_sample`; rows with a generator [of B] emit plain vLLM's tokens.

    vLLM's sampler calls the module's function `rejection_sample`, which is replaced for the time of this call.
    """
    states = {row: generator.get_state() for row, generator in generators.items()}
    # the next number of each generator is then that of the bonus token, which vLLM's sampler draws
    numbers = {row: draw_numbers(generator, num_drafts[row]) for row, generator in generators.items()}
    original: Callable[..., Tensor] = rejection_sampler.rejection_sample

    def sample(*given: Any, synthetic_mode: bool = False, **more: Any) -> Tensor:  # given: of `rejection_sample`
        drafts, num_drafts, _, ends, _, target_logits, bonus, metadata = given
        if synthetic_mode or metadata.all_greedy:
            tokens = original(*given, synthetic_mode=synthetic_mode, **more)
        else:
            tokens = rejection_sample(*given)
        for row, generator in generators.items():
            span = slice(int(ends[row]) - num_drafts[row], int(ends[row]))
            sampled = sample_tokens(target_logits[span], numbers[row])
            kept = 1 + int((sampled == drafts[span]).long().cumprod(0).sum())
            tokens[row] = NONE
            tokens[row, :kept] = torch.cat([sampled, bonus[row].to(sampled)])[:kept]
            generator.set_state(states[row])
            draw_numbers(generator, kept)
        return tokens

    rejection_sampler.rejection_sample = sample
    try:
        yield
    finally:
        rejection_sampler.rejection_sample = original
