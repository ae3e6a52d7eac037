"""Served against predicted: what vLLM counted, and what the Hugging Face target expects along the very same text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_mtpc.eval import text

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mtpc.engine.served import Served
    from vllm_mtpc.eval.metrics import Metrics
    from vllm_mtpc.eval.sampling import Sampling
    from vllm_mtpc.eval.text import Samples
    from vllm_mtpc.hf import Target

TOLERANCE = 0.02  # relative, of tokens/step
ERRORS = 3.0  # standard errors that are still noise
BATCH = 8
# A likelier token that is less than this much likelier (nats) may lose by rounding alone, by the target's dtype.
TIE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


class Cause(NamedTuple):
    """``name``: drafts, target, precision, positions, hidden state, u or head."""

    name: str
    sentence: str


class Asked(NamedTuple):
    """What vLLM was asked."""

    prompts: Sequence[Sequence[int]]
    num_drafts: int
    top_k: int = 0
    top_p: float = 1.0
    seeds: Sequence[int] | None = None  # of the requests, where the family needs them
    draft_pass: str | None = None  # as --draft-pass


@dataclass(frozen=True)
class Chain:
    """Whether the served text is the Hugging Face target's."""

    tokens: int
    differing: int  # greedy: tokens that are not its likeliest one, ties set apart
    ties: int
    surprise: float  # sampled: (-log p of the text - entropy) in standard errors; 0 for text of the target's own

    @property
    def other_target(self) -> bool:
        """More than one token in a hundred is not the target's, or a sampled text is not of its distribution."""
        return self.differing > max(1, 0.01 * self.tokens) or abs(self.surprise) > 5


@dataclass(frozen=True)
class Comparison:
    """One temperature."""

    served: Served
    sampling: Sampling
    samples: Samples
    predicted: Metrics
    noise: float  # standard error of the served tokens/step given the text
    chain: Chain
    recorded: str = ""  # prefix of the names of the metrics in a head's provenance that are of the kind served

    @property
    def difference(self) -> float:
        """Served by predicted tokens/step, less one; both over the steps that drafted: those are the head's."""
        return self.served.acceptance.tokens_per_drafted_step / self.predicted.tokens_per_step - 1

    @property
    def differs(self) -> bool:
        """By more than the tolerance and more than noise."""
        return not self.agrees(self.predicted)

    def agrees(self, predicted: Metrics) -> bool:
        """Whether the served tokens/step is that of ``predicted``, up to tolerance or noise."""
        off = abs(self.served.acceptance.tokens_per_drafted_step - predicted.tokens_per_step)
        return off <= max(TOLERANCE * predicted.tokens_per_step, ERRORS * self.noise)

    def distance(self, predicted: Metrics) -> float:
        """Largest difference between the served acceptance and the predicted one over the positions."""
        pairs = zip(self.served.acceptance.per_position, predicted.per_position, strict=False)
        return max((abs(served - expected) for served, expected in pairs), default=0.0)


def continued(
    target: Target, asked: Asked, served: Served, sampling_of: Callable[[int, list[int]], Sampling]
) -> Samples:
    """The served texts as samples of the target.

    The last step of a text looks at drafts past its end, and vLLM counts them although their tokens are cut: the target
    continues the text for that step. ``sampling_of`` (number of the first text, lengths): how a batch is continued.
    """
    texts = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(asked.prompts, served.outputs, strict=True)]
    generator = torch.Generator(target.device).manual_seed(0)
    pieces = []
    for start in range(0, len(texts), BATCH):
        part = texts[start : start + BATCH]
        sampling = sampling_of(start, [len(row) for row in part])
        pieces.append(text.generate(target, part, 0, sampling, generator, overhang=asked.num_drafts, stops=set()))
    return replace(text.join(pieces), prompt_lengths=torch.tensor([len(prompt) for prompt in asked.prompts]))


@torch.inference_mode()
def check_chain(target: Target, samples: Samples, sampling: Sampling) -> Chain:
    """Compares every token of the continuations with the target's distribution of it."""
    tie = TIE.get(target.dtype, max(TIE.values()))
    count = differing = ties = 0
    excess = variance = 0.0
    for _, tokens, logits in samples.continuations(target):
        log_p = sampling.log_probs(logits)
        chosen = log_p.gather(-1, tokens[:, None])[:, 0]
        count += len(tokens)
        if sampling.greedy:
            gap = log_p.amax(-1) - chosen
            differing += int((gap > tie).sum())
            ties += int(((gap > 0) & (gap <= tie)).sum())
        else:
            mean, spread = _surprisal(log_p)
            excess += (-chosen - mean).clamp(max=30.0).sum().item()  # a token of no probability is 30 nats
            variance += spread.sum().item()
    return Chain(count, differing, ties, excess / math.sqrt(variance) if variance else 0.0)


def _surprisal(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of -log p(x) for x ~ p, [...] of log_p[..., V]."""
    p, surprisal = log_p.exp(), -log_p.clamp(min=-1e4)
    mean = (p * surprisal).sum(-1)
    return mean, (p * (surprisal - mean[..., None]) ** 2).sum(-1)


def other_number_of_drafts(comparisons: Sequence[Comparison], num_drafts: int) -> Cause | None:
    for comparison in comparisons:
        counted = comparison.served.acceptance
        given = counted.draft_tokens / counted.drafts if counted.drafts else 0
        if round(given) != num_drafts:
            return Cause(
                "drafts",
                f"vLLM checked {given:.1f} drafts per step where {num_drafts} were expected: another "
                "num_speculative_tokens is served",
            )
    return None


def other_target(target: Target, comparisons: Sequence[Comparison]) -> Cause | None:
    for comparison in comparisons:
        chain = comparison.chain
        if chain.other_target:
            if comparison.sampling.greedy:
                wrong = f"{chain.differing} of {chain.tokens} greedy tokens"
                shown = f"{wrong} are not its likeliest ones ({chain.ties} ties apart)"
            else:
                shown = f"the sampled text is {chain.surprise:+.1f} standard errors from its distribution"
            return Cause(
                "target",
                f"the served text is not that of {target.name}: {shown}; another target, revision, dtype or tokenizer "
                "is served",
            )
    return None


def lost_positions(comparisons: Sequence[Comparison]) -> Cause | None:
    for comparison in comparisons:
        dead = _dead_position(comparison)
        if dead:
            return Cause(
                "drafts",
                f"no draft beyond position {dead} was ever accepted: drafts are lost or cut before verification",
            )
    return None


def _dead_position(comparison: Comparison) -> int:
    """k if drafts 1..k are accepted, and of the next 10 or more were to be expected behind them but none is; else 0."""
    counts, predicted = comparison.served.acceptance.accepted_per_position, comparison.predicted.per_position
    for k in range(1, len(counts)):
        if not counts[k]:
            return k if predicted[k - 1] and counts[k - 1] * predicted[k] / predicted[k - 1] >= 10 else 0
    return 0


def nearest(
    comparisons: Sequence[Comparison], rivals: Iterable[tuple[Cause, Callable[[Comparison], Metrics]]]
) -> Cause | None:
    """The rival way of drafting whose prediction is what was served, the nearest one; None where none is near."""
    found: list[tuple[float, Cause]] = []
    for cause, predict in rivals:
        distance, explains = 0.0, True
        for comparison in comparisons:
            metrics = predict(comparison)
            closer = comparison.distance(metrics) < 0.5 * comparison.distance(comparison.predicted)
            explains &= comparison.agrees(metrics) and (closer or not comparison.differs)
            distance += comparison.distance(metrics)
        if explains:
            found.append((distance, cause))
    return min(found)[1] if found else None
