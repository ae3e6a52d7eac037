"""Verification by coupling on Model Runner V1 on a CPU: a request with a seed has the text that plain vLLM writes.

vLLM's sampler there draws one number per token from the request's generator, and hashes the token's Gumbel noise from
it. So the numbers of the next tokens can be read ahead and put back: drafts are drawn with them, the target's token at
a drafted row is drawn with the same (as in `v2/verification.py`), and the generator moves on by as many as were kept.

On other devices V1 draws noise of the vocabulary's size per token, and what a step kept is known when it is over; there
a seed promises the distribution alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor
from vllm.v1.sample import rejection_sampler

NUMBERS = 2**31  # a token's number is below; as in TopKTopPSampler.forward_cpu


def couples(runner: Any) -> bool:
    """Whether a runner's requests with a seed are coupled."""
    spec, sampler = runner.speculative_config, runner.sampler.topk_topp_sampler
    is_left = spec.verify == "rejection" or spec.rejection_sample_method != "standard"
    return not is_left and sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel


def take(generator: Generator, count: int) -> Tensor:
    """The numbers [count] int64 of the next tokens, one draw each."""
    return torch.randint(0, NUMBERS, (count,), generator=generator, dtype=torch.int64)


def read_ahead(generator: Generator, count: int) -> Tensor:
    """The same, and they will be drawn again."""
    state = generator.get_state()
    numbers = take(generator, count)
    generator.set_state(state)
    return numbers


def draw(logits: Tensor, numbers: Tensor) -> Tensor:
    """Tokens [T] int64 of processed logits [T, V] float32, as vLLM draws them with these numbers [T]."""
    return torch.ops._C.fused_gumbel_argmax(logits.contiguous(), numbers)


@contextmanager
def coupled(generators: dict[int, Generator], num_drafts: list[int]) -> Iterator[None]:
    """While a batch is verified: the tokens of rows with a generator [of B] are plain vLLM's."""
    states = {row: generator.get_state() for row, generator in generators.items()}
    # a generator then stands before the number of the bonus token, which vLLM's sampler draws
    numbers = {row: take(generator, num_drafts[row]) for row, generator in generators.items()}
    theirs = rejection_sampler.rejection_sample

    def rejection_sample(
        drafts: Tensor,  # [T]
        num_drafts: list[int],
        width: int,
        ends: Tensor,  # [B] of each request's drafts
        draft_probs: Tensor | None,
        target_logits: Tensor,  # [T, V], processed
        bonus: Tensor,  # [B, 1]
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Tokens [B, K + 1] int32, -1 behind the last."""
        tokens = theirs(drafts, num_drafts, width, ends, draft_probs, target_logits, bonus, *args, **kwargs)
        for row, generator in generators.items():
            at = slice(int(ends[row]) - num_drafts[row], int(ends[row]))
            drawn = draw(target_logits[at], numbers[row])
            kept = 1 + int((drawn == drafts[at]).long().cumprod(0).sum())
            tokens[row] = -1
            tokens[row, :kept] = torch.cat([drawn, bonus[row].to(drawn)])[:kept]
            generator.set_state(states[row])
            take(generator, kept)
        return tokens

    rejection_sampler.rejection_sample = rejection_sample
    try:
        yield
    finally:
        rejection_sampler.rejection_sample = theirs
