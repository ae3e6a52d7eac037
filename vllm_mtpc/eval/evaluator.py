"""A head attached to its target, as `vllm-mtpc eval` and `doctor` use it; each family of heads has an `Evaluator`."""

from __future__ import annotations

import itertools
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from vllm_mtpc.checkpoint import read_config, resolve_head, resolve_verifier
from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.engine.served import Served
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.metrics import StepMetrics
from vllm_mtpc.eval.text import Samples, Sampling, generate, join
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.hf import Target, choose_device, load_target

TOLERANCE = 0.02  # relative, of tokens/step
ERRORS = 3.0  # standard errors that are still noise
BATCH = 8
# Log-probabilities (nats) this close are a tie: rounding of the target's dtype decides between the tokens.
TIE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


class Cause(NamedTuple):
    """Why served and expected tokens/step differ."""

    name: str  # drafts, target, precision, hidden state, u or head
    sentence: str


class Asked(NamedTuple):
    """The requests that vLLM answered."""

    prompts: Sequence[Sequence[int]]
    num_drafts: int
    top_k: int = 0
    top_p: float = 1.0
    seeds: Sequence[int] | None = None  # of the requests, where the family needs them
    draft_pass: str | None = None  # of --draft-pass


@dataclass(frozen=True)
class Chain:
    """Whether the served text is the Hugging Face target's."""

    tokens: int
    differing: int  # greedy: tokens that are neither its most likely one nor tied with it
    surprise: float  # sampled: (-log p of the text - entropy) in standard errors; 0 on average for the target's text

    @property
    def other_target(self) -> bool:
        """More than 1 % of the tokens are not the target's, or a sampled text is not of its distribution."""
        return self.differing > max(1, 0.01 * self.tokens) or abs(self.surprise) > 5


@dataclass(frozen=True)
class Comparison:
    """Served and predicted tokens/step at one temperature."""

    served: Served
    sampling: Sampling
    samples: Samples
    predicted: StepMetrics
    noise: float  # standard error of the served tokens/step given the text
    chain: Chain

    @property
    def difference(self) -> float:
        """Served divided by predicted tokens/step, minus one; both over the steps that drafted."""
        return self.served.acceptance.tokens_per_drafted_step / self.predicted.tokens_per_step - 1

    @property
    def differs(self) -> bool:
        return not self.agrees(self.predicted)

    def agrees(self, predicted: StepMetrics) -> bool:
        """Whether the served tokens/step equals ``predicted`` up to tolerance or noise."""
        off = abs(self.served.acceptance.tokens_per_drafted_step - predicted.tokens_per_step)
        return off <= max(TOLERANCE * predicted.tokens_per_step, ERRORS * self.noise)

    def distance(self, predicted: StepMetrics) -> float:
        """Return the largest difference of served and predicted acceptance over the positions."""
        pairs = zip(self.served.acceptance.per_position, predicted.per_position, strict=False)
        return max((abs(served - expected) for served, expected in pairs), default=0.0)


class Evaluator(Protocol):
    """A head attached to its target. The commands do not depend on its family."""

    folder: Path
    config: Any  # of the family
    target: Target
    seeded: ClassVar[bool] = False  # served text is compared draft by draft, so requests need seeds
    refusal: ClassVar[str | None] = None  # text in vLLM's log where the family cannot be served on this machine
    unserved: ClassVar[str] = ""  # error message of `doctor` in this case

    @classmethod
    def attach(cls, folder: Path, target: Target) -> Evaluator:
        """Load the head of a folder for a loaded target of matching sizes."""

    @staticmethod
    def default_sampling(config: Any) -> tuple[float, int, float]:
        """Return the default temperature, top-k and top-p."""
        return 1.0, 0, 1.0

    @staticmethod
    def serving(args: Namespace, config: Any, num_drafts: int, max_num_seqs: int) -> dict[str, Any]:
        """Return options with which vLLM verifies every draft. Raises UsageError for options of other families."""

    def sampling(self, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampling:
        """Return the sampling of text and drafts, as the head is served by default."""
        return Sampling(temperature, top_p, top_k=top_k)

    def measure(self, prompts: Sequence[Tensor], temperature: float, num_drafts: int, args: Namespace) -> Any:
        """Let the target write text at one temperature, and evaluate the head on it."""
        target, sampling = self.target, self.sampling(temperature, args.top_p, args.top_k)
        generator = torch.Generator(target.device).manual_seed(args.seed)
        with tqdm(total=len(prompts), desc=f"T={temperature:g} text", unit="text", disable=None) as bar:
            how = {"overhang": num_drafts, "batch": args.batch, "progress": bar.update}
            samples = generate(target, prompts, args.new_tokens, sampling, generator, **how)
        return self.evaluate(samples, sampling, num_drafts, args.seed)

    def evaluate(self, samples: Samples, sampling: Sampling, num_drafts: int, seed: int) -> Any:
        """Evaluate the head on text of the target; the result has the field `temperature`."""

    def title(self, num_drafts: int) -> str:
        """Describe the head in one line."""

    def rows(self, result: Any) -> dict[str, str]:
        """Return the column of the table for the result of one temperature, by the names of the rows."""

    def warnings(self, results: Sequence[Any]) -> list[str]:
        """Return warnings about the head that follow from the results, a line each."""
        return []

    def compare(self, asked: Asked, served: Served) -> Comparison:
        """Compute the counters that are expected along the served text."""

    def continue_served(self, asked: Asked, served: Served, sampling_of: Callable[[int, list[int]], Any]) -> Samples:
        """Return the served texts as samples of the target.

        vLLM counts the drafts of a text's last step also past its end, where their tokens are dropped: the target
        continues the text for that step, with the sampling ``sampling_of`` (number of the first text, lengths).
        """
        texts = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(asked.prompts, served.outputs, strict=True)]
        generator, pieces = torch.Generator(self.target.device).manual_seed(0), []
        for start in range(0, len(texts), BATCH):
            part = texts[start : start + BATCH]
            sampling = sampling_of(start, [len(row) for row in part])
            pieces.append(generate(self.target, part, 0, sampling, generator, overhang=asked.num_drafts, stops=set()))
        return replace(join(pieces), prompt_lengths=torch.tensor([len(prompt) for prompt in asked.prompts]))

    @torch.inference_mode()
    def check_chain(self, samples: Samples, sampling: Sampling) -> Chain:
        """Compare every token of the continuations with the target's distribution."""
        tie, count, differing = TIE.get(self.target.dtype, max(TIE.values())), 0, 0
        excess = variance = 0.0
        for _, tokens, logits in samples.continuations(self.target):
            log_p = sampling.log_probs(logits)
            chosen = log_p.gather(-1, tokens[:, None])[:, 0]
            count += len(tokens)
            if sampling.greedy:
                differing += int((log_p.amax(-1) - chosen > tie).sum())
                continue
            p, nats = log_p.exp(), -log_p.clamp(min=-1e4)  # -log p(x)
            mean = (p * nats).sum(-1, keepdim=True)  # of x ~ p
            excess += (-chosen - mean[:, 0]).clamp(max=30.0).sum().item()  # a token of no probability is 30 nats
            variance += (p * (nats - mean) ** 2).sum().item()
        return Chain(count, differing, excess / math.sqrt(variance) if variance else 0.0)

    def find_cause(self, comparisons: Sequence[Any], num_drafts: int) -> Cause:
        """Return the most likely cause where one of the comparisons differs."""
        drafts = (_other_number_of_drafts(one, num_drafts) for one in comparisons)
        target = (_other_target(one, self.target) for one in comparisons)
        return (
            next(filter(None, itertools.chain(drafts, target)), None)
            or self.find_drafting_fault(comparisons, num_drafts)
            or next(filter(None, map(_lost_positions, comparisons)), None)
            or self.find_head_fault(comparisons, num_drafts)
        )

    def find_drafting_fault(self, comparisons: Sequence[Any], num_drafts: int) -> Cause | None:
        """Return the fault of drafting that explains the served counters, if one does."""

    def find_head_fault(self, comparisons: Sequence[Any], num_drafts: int) -> Cause:
        """Return the cause that remains after every other one was excluded."""

    def find_untrained_head(self, comparisons: Sequence[Any], num_drafts: int) -> Cause | None:
        """Return the cause where the head is served as predicted, but its drafts are no better than chance."""


def resolve(name: str) -> tuple[Path, AnyHeadConfig]:
    """Return folder and config of a head without loading it. Raises CheckpointError or HeadConfigError."""
    folder = resolve_head(name)
    return folder, read_config(folder)


def target_of(folder: Path, config: AnyHeadConfig, given: str | None) -> str:
    """Return the target's name: ``given``, or the head's verifier."""
    return given or resolve_verifier(folder, config.speculators_config.verifier.name_or_path)


def load(name: str, target: str | None = None, dtype: str = "auto", device: str = "auto") -> Evaluator:
    """Load a head and its target, which computes in ``dtype``. Raises MtpcError where either cannot be loaded."""
    folder, config = resolve(name)
    target_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    model = load_target(target_of(folder, config, target), target_dtype, choose_device(device), attention="torch")
    return attach(folder, model)


def attach(folder: Path, target: Target) -> Evaluator:
    """Load the head of a folder for a loaded target. Raises UsageError where their sizes differ."""
    config = read_config(folder)
    for name in ("vocab_size", "hidden_size"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise UsageError(
                f"head {folder} has {name}={ours}, but target {target.name} has {theirs}; give --target the one it was "
                f"trained for ({config.speculators_config.verifier.name_or_path})"
            )
    return FAMILIES[config.speculators_model_type].evaluator.attach(folder, target)


def _other_number_of_drafts(comparison: Comparison, num_drafts: int) -> Cause | None:
    acceptance = comparison.served.acceptance
    given = acceptance.draft_tokens / max(1, acceptance.drafts)
    if round(given) == num_drafts:
        return None
    wrong = f"vLLM checked {given:.1f} drafts per step where {num_drafts} were expected"
    return Cause("drafts", f"{wrong}: another num_speculative_tokens is served")


def _other_target(comparison: Comparison, target: Target) -> Cause | None:
    chain = comparison.chain
    if not chain.other_target:
        return None
    shown = f"the sampled text is {chain.surprise:+.1f} standard errors from its distribution"
    if comparison.sampling.greedy:
        shown = f"{chain.differing} of {chain.tokens} greedy tokens are not its most likely ones"
    sentence = f"the served text is not that of {target.name}: {shown}"
    return Cause("target", f"{sentence}; another target, revision, dtype or tokenizer is served")


def _lost_positions(comparison: Comparison) -> Cause | None:
    """Drafts 1..k are accepted, and of the next ones none, although 10 or more are expected."""
    counts, predicted = comparison.served.acceptance.accepted_per_position, comparison.predicted.per_position
    k = next((k for k in range(1, len(counts)) if not counts[k]), 0)
    if not k or not predicted[k - 1] or counts[k - 1] * predicted[k] / predicted[k - 1] < 10:
        return None
    lost = f"no draft beyond position {k} was ever accepted: drafts are lost or pruned before verification"
    return Cause("drafts", lost)


def nearest(comparisons: Sequence[Any], rivals: Iterable[tuple[Cause, Callable[[Any], StepMetrics]]]) -> Cause | None:
    """Return the cause whose prediction is nearest to the served counters; None where none explains them."""
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
