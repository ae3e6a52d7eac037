"""Served against predicted: what vLLM counted, and what the Hugging Face target expects along the very same text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from vllm_mtpc.eval import text
from vllm_mtpc.eval.acceptance import Contexts, Figures, collect, step_starts, summarise

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vllm_mtpc.engine.served import Served
    from vllm_mtpc.eval.sampling import Sampling
    from vllm_mtpc.eval.text import Samples
    from vllm_mtpc.heads.adapters import DraftLayers
    from vllm_mtpc.hf import Target

TOLERANCE = 0.02  # relative, of tokens/step
ERRORS = 3.0  # standard errors that are still noise
# A likelier token that is less than this much likelier (nats) may lose by rounding alone, by the target's dtype.
TIE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


@dataclass(frozen=True)
class Chain:
    """Whether the served text is the Hugging Face target's."""

    tokens: int
    differing: int  # greedy: tokens that are not its likeliest one, ties set apart
    ties: int
    surprise: float  # sampled: (-log p of the text - entropy) in standard errors; 0 for text of the target's own law

    @property
    def other_target(self) -> bool:
        """More than one token in a hundred is not the target's, or a sampled text is not of its law."""
        return self.differing > max(1, 0.01 * self.tokens) or abs(self.surprise) > 5


@dataclass(frozen=True)
class Comparison:
    """One temperature."""

    served: Served
    sampling: Sampling
    samples: Samples
    contexts: Contexts | None  # of a circuit
    predicted: Figures
    noise: float  # standard error of the served tokens/step given the text
    chain: Chain

    @property
    def difference(self) -> float:
        """Served by predicted tokens/step, less one; both over the steps that drafted: those are the head's."""
        return self.served.acceptance.tokens_per_drafted_step / self.predicted.tokens_per_step - 1

    @property
    def differs(self) -> bool:
        """By more than the tolerance and more than noise."""
        return not self.agrees(self.predicted)

    def agrees(self, predicted: Figures) -> bool:
        """Whether the served tokens/step is that of ``predicted``, up to tolerance or noise."""
        off = abs(self.served.acceptance.tokens_per_drafted_step - predicted.tokens_per_step)
        return off <= max(TOLERANCE * predicted.tokens_per_step, ERRORS * self.noise)

    def distance(self, predicted: Figures) -> float:
        """Largest difference between the served acceptance and the predicted one over the positions."""
        pairs = zip(self.served.acceptance.per_position, predicted.per_position, strict=False)
        return max((abs(served - expected) for served, expected in pairs), default=0.0)


def compare(
    head: nn.Module,
    target: Target,
    prompts: Sequence[Sequence[int]],
    served: Served,
    sampling: Sampling,
    num_drafts: int,
    layers: DraftLayers | None = None,
) -> Comparison:
    """What ``head``, behind draft ``layers`` if any, should have counted along the served text, from each prompt on.

    The last step of a text looks at drafts past its end, and vLLM counts them although their tokens are cut: the text
    is continued by the target itself for that step (exact at temperature 0, else one more draw of the same law).
    """
    texts = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, served.outputs, strict=True)]
    generator = torch.Generator(target.device).manual_seed(0)
    samples = text.generate(target, texts, 0, sampling, generator, overhang=num_drafts, stops=set(), batch=8)
    samples = replace(samples, prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]))
    if layers is not None:
        samples = text.with_draft_layers(samples, layers)
    contexts = collect(head, target, samples, sampling, num_drafts)
    return Comparison(
        served=served,
        sampling=sampling,
        samples=samples,
        contexts=contexts,
        predicted=summarise(contexts, overlap=False),
        noise=noise_given_text(contexts),
        chain=check_chain(target, samples, sampling),
    )


def noise_given_text(contexts: Contexts) -> float:
    """Standard error of the tokens/step that a server counts, the text being given: only its steps are random.

    The variance of sum over steps of (accepted - mean accepted), by its first two moments along the steps; exact. 0
    for greedy text.
    """
    alive, valid = contexts.text, contexts.valid
    starts = step_starts(alive) * valid
    steps = starts.sum()
    mean = ((starts[..., None] * alive).sum() / steps).item()
    sequences, length, drafts = alive.shape
    at_least = torch.cat([alive.new_ones(sequences, length, 1), alive, alive.new_zeros(sequences, length, 1)], -1)
    exactly = (at_least[..., :-1] - at_least[..., 1:]) * valid[..., None]  # [S, T, K + 1]
    gain = torch.arange(drafts + 1, dtype=alive.dtype) - mean
    moments = alive.new_zeros(3, sequences, length + drafts + 1)  # of the sum so far, on the event that a step starts
    moments[0, :, 0] = 1
    for t in range(length):
        zeroth, first, second = (moments[order, :, t : t + 1] for order in range(3))
        ahead = slice(t + 1, t + drafts + 2)
        moments[0, :, ahead] += zeroth * exactly[:, t]
        moments[1, :, ahead] += (first + zeroth * gain) * exactly[:, t]
        moments[2, :, ahead] += (second + 2 * first * gain + zeroth * gain**2) * exactly[:, t]
    ended = torch.cat([~valid, valid.new_ones(sequences, drafts + 1)], 1)  # where no step starts any more
    first, second = ((moments[order] * ended).sum(1) for order in (1, 2))
    return math.sqrt(max(0.0, (second - first**2).sum().item())) / steps.item()


@torch.inference_mode()
def check_chain(target: Target, samples: Samples, sampling: Sampling) -> Chain:
    """Compares every token of the continuations with the target's law of it."""
    tie = TIE.get(target.dtype, max(TIE.values()))
    tokens = differing = ties = 0
    excess = variance = 0.0
    for row in range(len(samples.tokens)):
        start, end = int(samples.prompt_lengths[row]), int(samples.lengths[row])
        log_p = sampling.log_probs(target.logits(samples.hidden[row, start - 1 : end - 1].to(target.device)))
        chosen = log_p.gather(-1, samples.tokens[row, start:end, None].to(target.device))[:, 0]
        tokens += end - start
        if sampling.greedy:
            gap = log_p.amax(-1) - chosen
            differing += int((gap > tie).sum())
            ties += int(((gap > 0) & (gap <= tie)).sum())
        else:
            mean, spread = _surprisal(log_p)
            excess += (-chosen - mean).clamp(max=30.0).sum().item()  # a token of no probability is 30 nats
            variance += spread.sum().item()
    return Chain(tokens, differing, ties, excess / math.sqrt(variance) if variance else 0.0)


def _surprisal(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of -log p(x) for x ~ p, [...] of log_p[..., V]."""
    p, surprisal = log_p.exp(), -log_p.clamp(min=-1e4)
    mean = (p * surprisal).sum(-1)
    return mean, (p * (surprisal - mean[..., None]) ** 2).sum(-1)
