"""What an evaluator does: it says what a head on its target should gain, and why it gains something else when served.

`vllm-mtpc eval`, `generate` and `doctor` are each written once and know no family of heads. They ask the evaluator of
the head's family (`vllm_mtpc.families`), which is the head on its target:

- ``eval``: expected tokens/step on text that the target has written, with the rows of the table to print;
- ``generate``: how a step of a decoding loop drafts and verifies (``decode.Drafting``);
- ``doctor``: how the head is to be served, what it should have counted along the very text that vLLM served, and why it
  did not.

An option of a command that only some families have is refused by the others (``check_options``). What stands here is
what a family does that has nothing of its own to say, and what all share: what vLLM served is compared with what the
Hugging Face target expects along the very same text.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from vllm_mtpc.engine.served import Served
from vllm_mtpc.eval.decode import Drafting, continue_all, counted
from vllm_mtpc.eval.metrics import Metrics
from vllm_mtpc.eval.text import Samples, Sampling, generate, join
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


class Evaluator(Protocol):
    """A head on its target."""

    folder: Path
    config: Any  # the family's
    target: Target
    step_note: ClassVar[str | None] = None  # what ``generate`` says of a step
    seeded: ClassVar[bool] = False  # whether served text is compared draft by draft, so that requests need seeds
    refusal: ClassVar[str | None] = None  # beginning of the line with which vLLM may refuse the family on a machine

    @classmethod
    def attach(cls, folder: Path, target: Target, head_dtype: torch.dtype = ...) -> Evaluator:
        """The head of a folder on a target that is loaded and has its sizes."""

    @staticmethod
    def check_options(args: Namespace) -> None:
        """Raises UsageError for options of a command that the family does not have."""

    @staticmethod
    def default_sampling(config: Any) -> tuple[float, int, float]:
        """Temperature, top-k and top-p of a command that names none."""
        return 1.0, 0, 1.0

    @staticmethod
    def serving(args: Namespace, config: Any, num_drafts: int, max_num_seqs: int) -> dict[str, Any]:
        """More of `speculative_config`, with which every draft is verified."""

    def sampling(self, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampling:
        """How tokens are picked, drafts as the head is served by default."""
        return Sampling(temperature, top_p, top_k=top_k)

    def check_decoding(self, what: str) -> None:
        """Raises UsageError where ``what`` cannot run the head."""

    def drafting(self, sampling: Sampling, num_drafts: int, seed: int) -> Drafting:
        """The head's part of a decoding loop."""

    def evaluate(self, samples: Samples, sampling: Sampling, num_drafts: int, args: Namespace) -> Any:
        """Results of one temperature on text of the target; ``measure`` adds what is ``simulated``."""

    def measure(self, prompts: Sequence[Tensor], temperature: float, num_drafts: int, args: Namespace) -> Any:
        """Results of one temperature: the target's text is written, the head evaluated on it."""
        target, sampling = self.target, self.sampling(temperature, args.top_p, args.top_k)
        generator, label = torch.Generator(target.device).manual_seed(args.seed), f"T={temperature:g}"
        with tqdm(total=len(prompts), desc=f"{label} text", unit="text", disable=None) as bar:
            how = {"overhang": num_drafts, "batch": args.batch, "progress": bar.update}
            samples = generate(target, prompts, args.new_tokens, sampling, generator, **how)
        found = self.evaluate(samples, sampling, num_drafts, args)
        if not args.simulate:
            return found
        drafting, some = self.drafting(sampling, num_drafts, args.seed), prompts[: args.simulate]
        texts = continue_all("speculative", target, some, drafting, args.new_tokens, f"{label} speculative")
        return replace(found, simulated=counted(texts))

    def title(self, num_drafts: int) -> str:
        """The head in a line."""

    def rows(self, results: Sequence[Any]) -> list[tuple[str, Callable[[Any], str]]]:
        """Rows of the table of results: their names, and what is shown of the result of one temperature."""

    def warnings(self, results: Sequence[Any]) -> list[str]:
        """What the results say against the head, a line each."""
        return []

    def compare(self, asked: Asked, served: Served) -> Comparison:
        """What the head should have counted along the served text."""

    def find_cause(self, comparisons: Sequence[Any], num_drafts: int) -> Cause:
        """The likeliest cause of a difference; asked where one of the comparisons differs."""
        return (
            first_cause(comparisons, lambda one: _other_number_of_drafts(one, num_drafts))
            or first_cause(comparisons, lambda one: _other_target(one, self.target))
            or self.wrong_drafting(comparisons, num_drafts)
            or first_cause(comparisons, _lost_positions)
            or self.other_head(comparisons, num_drafts)
        )

    def wrong_drafting(self, comparisons: Sequence[Any], num_drafts: int) -> Cause | None:
        """The mistake with which the head does what was served; None where none is near."""

    def other_head(self, comparisons: Sequence[Any], num_drafts: int) -> Cause:
        """The cause where nothing else is wrong."""

    def knows_nothing(self, comparisons: Sequence[Any], num_drafts: int) -> Cause | None:
        """The cause where the head is served as predicted, but predicted to know nothing of the text."""

    def notes(self, comparisons: Sequence[Any]) -> list[str]:
        """More on the comparisons, a line each."""
        return []

    def unserved(self, asked: Asked, temperature: float, args: Namespace) -> str:
        """Prints what can be said without vLLM, which answered with ``refusal``; returns what to type."""


def continued(target: Target, asked: Asked, served: Served, sampling_of: Callable[[int, list[int]], Any]) -> Samples:
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
        pieces.append(generate(target, part, 0, sampling, generator, overhang=asked.num_drafts, stops=set()))
    return replace(join(pieces), prompt_lengths=torch.tensor([len(prompt) for prompt in asked.prompts]))


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
            p, nats = log_p.exp(), -log_p.clamp(min=-1e4)  # -log p(x)
            mean = (p * nats).sum(-1, keepdim=True)  # of x ~ p
            excess += (-chosen - mean[:, 0]).clamp(max=30.0).sum().item()  # a token of no probability is 30 nats
            variance += (p * (nats - mean) ** 2).sum().item()
    return Chain(count, differing, ties, excess / math.sqrt(variance) if variance else 0.0)


def first_cause(comparisons: Iterable[Comparison], cause_of: Callable[[Any], Cause | None]) -> Cause | None:
    return next(filter(None, map(cause_of, comparisons)), None)


def _other_number_of_drafts(comparison: Comparison, num_drafts: int) -> Cause | None:
    acceptance = comparison.served.acceptance
    given = acceptance.draft_tokens / acceptance.drafts if acceptance.drafts else 0
    wrong = f"vLLM checked {given:.1f} drafts per step where {num_drafts} were expected"
    is_wrong = round(given) != num_drafts
    return Cause("drafts", f"{wrong}: another num_speculative_tokens is served") if is_wrong else None


def _other_target(comparison: Comparison, target: Target) -> Cause | None:
    chain = comparison.chain
    shown = f"the sampled text is {chain.surprise:+.1f} standard errors from its distribution"
    if comparison.sampling.greedy:
        wrong = f"{chain.differing} of {chain.tokens} greedy tokens"
        shown = f"{wrong} are not its likeliest ones ({chain.ties} ties apart)"
    sentence = f"the served text is not that of {target.name}: {shown}"
    other = f"{sentence}; another target, revision, dtype or tokenizer is served"
    return Cause("target", other) if chain.other_target else None


def _lost_positions(comparison: Comparison) -> Cause | None:
    """Where drafts 1..k are accepted, and of the next 10 or more were to be expected behind them but none is."""
    counts, predicted = comparison.served.acceptance.accepted_per_position, comparison.predicted.per_position
    k = next((k for k in range(1, len(counts)) if not counts[k]), 0)
    if not k or not predicted[k - 1] or counts[k - 1] * predicted[k] / predicted[k - 1] < 10:
        return None
    lost = f"no draft beyond position {k} was ever accepted: drafts are lost or cut before verification"
    return Cause("drafts", lost)


def nearest(comparisons: Sequence[Any], rivals: Iterable[tuple[Cause, Callable[[Any], Metrics]]]) -> Cause | None:
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
