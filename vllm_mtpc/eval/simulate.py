"""The serving rule carried out: drafts, accepts and rejects token by token, and counts as a server does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.acceptance import Figures, ratio
from vllm_mtpc.eval.decode import Decoded, continue_prompt
from vllm_mtpc.eval.text import stop_ids

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vllm_mtpc.eval.sampling import Sampling
    from vllm_mtpc.eval.text import Samples
    from vllm_mtpc.hf import Target


def run(
    mode: str,
    head: nn.Module,
    target: Target,
    prompts: Sequence[Tensor],
    new_tokens: int,
    sampling: Sampling,
    num_drafts: int | None = None,
    seed: int = 0,
    stops: set[int] | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[Decoded]:
    """Continues every 1-D prompt in ``mode`` (see ``decode``), one after the other, from one seed."""
    generator = torch.Generator(target.device).manual_seed(seed)
    stops = stop_ids(target) if stops is None else stops
    texts = []
    for prompt in prompts:
        texts.append(continue_prompt(mode, target, prompt, head, new_tokens, sampling, generator, num_drafts, stops))
        if progress:
            progress(1)
    return texts


def figures(texts: Sequence[Decoded]) -> Figures:
    """Figures of simulated texts; s.e. over texts. Raises UsageError where none of them took a step."""
    steps = torch.tensor([text.steps for text in texts], dtype=torch.float64)
    gained = torch.tensor([text.steps + sum(text.accepted) for text in texts], dtype=torch.float64)
    if not steps.sum():
        raise UsageError(
            "every text ended with its first token, so no step was drafted; raise the number of new tokens"
        )
    value, error = ratio(gained, steps)
    drafts = texts[0].num_drafts
    reached = torch.tensor([[count >= k for k in range(1, drafts + 1)] for text in texts for count in text.accepted])
    return Figures(
        tokens_per_step=value,
        standard_error=error,
        per_position=reached.double().mean(0).tolist(),
        anywhere=math.nan,  # steps start where they start
        sequences=len(texts),
        contexts=int(steps.sum()),
        steps=steps.sum().item(),
        target_bits=bits(texts),
    )


def bits(texts: Sequence[Decoded]) -> float:
    """Bits per token of the texts under the target at temperature 1."""
    nats = [value for text in texts for value in text.nats]
    return sum(nats) / len(nats) / math.log(2)


def own_bits(target: Target, samples: Samples, count: int) -> float:
    """Bits per token of the first ``count`` texts that the target wrote itself, under it at temperature 1."""
    nats, tokens = 0.0, 0
    for row in range(count):
        start, end = int(samples.prompt_lengths[row]), int(samples.lengths[row])
        log_p = target.logits(samples.hidden[row, start - 1 : end - 1].to(target.device)).log_softmax(-1)
        nats -= log_p.cpu().gather(-1, samples.tokens[row, start:end, None]).sum().item()
        tokens += end - start
    return nats / tokens / math.log(2)


def simulate(
    head: nn.Module,
    target: Target,
    prompts: Sequence[Tensor],
    new_tokens: int,
    sampling: Sampling,
    num_drafts: int | None = None,
    seed: int = 0,
    stops: set[int] | None = None,
) -> Figures:
    """Figures of the serving rule carried out on ``prompts``; agrees with ``measure`` within their noise."""
    return figures(run("speculative", head, target, prompts, new_tokens, sampling, num_drafts, seed, stops))
