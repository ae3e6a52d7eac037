"""The evaluator of circuit heads."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.engine.served import Served
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.acceptance import Contexts, Metrics, collect, summarise
from vllm_mtpc.eval.evaluator import Asked, Cause, Comparison, Evaluator, nearest
from vllm_mtpc.eval.metrics import exact_counts, shown_shares, shown_tokens, step_starts
from vllm_mtpc.eval.text import Samples, Sampling, with_backbone, with_draft_layers
from vllm_mtpc.heads.adapters import DraftLayers
from vllm_mtpc.heads.backbone import BackboneHead
from vllm_mtpc.heads.base import Head
from vllm_mtpc.hf import Target, bind

Rival = tuple[Cause, Callable[[Comparison], Metrics]]
NEAR_CHANCE = 0.15  # fraction of the distance from chance to the prediction


@dataclass(frozen=True)
class Evaluation:
    """Results of one temperature."""

    temperature: float
    expected: Metrics  # last factor of each product averaged over the target's distribution
    along_text: Metrics  # the expectation given these texts


@dataclass(frozen=True)
class MtpcEvaluator(Evaluator):
    """A circuit head in float32 on its target's device."""

    folder: Path
    config: HeadConfig
    head: Head
    target: Target
    draft_layers: DraftLayers | None = None

    @classmethod
    def attach(cls, folder: Path, target: Target, head_dtype: torch.dtype = torch.float32) -> MtpcEvaluator:
        config, head = load_head(folder, head_dtype, target.device)
        bind(head, target)
        return cls(folder, config, head, target, DraftLayers.load(folder, target) if config.lora_layers else None)

    @staticmethod
    def serving(args: Namespace, config: HeadConfig, num_drafts: int, max_num_seqs: int) -> dict[str, Any]:
        if args.draft_pass:
            raise UsageError("--draft-pass: circuits draft without a pass; leave it out, or name a PTP head")
        return {"min_acceptance": 0}

    def sampling(self, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampling:
        return Sampling(temperature, top_p, self.config.draft_sample_method == "greedy", top_k)

    def evaluate(self, samples: Samples, sampling: Sampling, num_drafts: int, seed: int) -> Evaluation:
        contexts = collect(self.head, self.target, self._read(samples), sampling, num_drafts)
        return Evaluation(sampling.temperature, summarise(contexts), summarise(contexts, overlap=False))

    def title(self, num_drafts: int) -> str:
        config = self.config
        return f"{self.folder}: {config.circuit}, n={config.window}, r={config.num_components}, K={num_drafts} drafts"

    def rows(self, result: Evaluation) -> dict[str, str]:
        expected = result.expected
        return {
            "tokens/step, expected ± s.e.": shown_tokens(expected),
            "  given these texts": shown_tokens(result.along_text),
            "  from any position": f"{expected.anywhere:.3f}",
            "acceptance per position": shown_shares(expected.per_position),
            "bits per token, target": f"{expected.target_bits:.3f}",
            "bits per token, circuit's joint": f"{expected.joint_bits:.3f}",
            "texts, contexts": f"{expected.sequences}, {expected.contexts:,}",
        }

    def compare(self, asked: Asked, served: Served) -> Comparison:
        sampling = self.sampling(served.temperature, asked.top_p, asked.top_k)
        samples = self._read(self.continue_served(asked, served, lambda *_: sampling))
        contexts = collect(self.head, self.target, samples, sampling, asked.num_drafts)
        chain, predicted = self.check_chain(samples, sampling), summarise(contexts, overlap=False)
        return Comparison(served, sampling, samples, predicted, noise_given_text(contexts), chain)

    def _read(self, samples: Samples) -> Samples:
        if isinstance(self.head, BackboneHead):
            return with_backbone(samples, self.head, self.target)
        return samples if self.draft_layers is None else with_draft_layers(samples, self.draft_layers)

    def find_drafting_fault(self, comparisons: Sequence[Comparison], num_drafts: int) -> Cause | None:
        return nearest(comparisons, self._rivals(num_drafts))

    def find_head_fault(self, comparisons: Sequence[Comparison], num_drafts: int) -> Cause:
        for comparison in comparisons:
            floor = self._chance(comparison, num_drafts)
            served, predicted = comparison.served.acceptance.per_position[0], comparison.predicted.per_position[0]
            if served - floor < NEAR_CHANCE * (predicted - floor):
                return Cause(
                    "hidden state",
                    f"drafts at position 1 are accepted in {served:.0%} of steps, as often as for unrelated contexts "
                    f"({floor:.0%}): the head reads a wrong hidden state, or weights other than those of {self.folder}",
                )
        return Cause(
            "head",
            "the target's text, the precision, the number of drafts and the hidden state are as they should be, so the "
            f"weights that were served are not those of {self.folder}: look for another head in the server's "
            "speculative_config",
        )

    def find_untrained_head(self, comparisons: Sequence[Comparison], num_drafts: int) -> Cause | None:
        """The predicted drafts are no better than chance: the head was not trained for these weights."""
        for comparison in comparisons:
            floor, predicted = self._chance(comparison, num_drafts), comparison.predicted.per_position[0]
            noise = (floor * (1 - floor) / max(1.0, comparison.predicted.steps)) ** 0.5
            if predicted - floor > max(0.02, 3 * noise):
                return None
        return Cause(
            "hidden state",
            f"served as predicted, but drafts are accepted no more often than for unrelated contexts ({floor:.0%}): "
            f"the head is untrained or was trained for other weights than {self.target.name} "
            f"(its verifier: {self.config.speculators_config.verifier.name_or_path})",
        )

    def _rivals(self, num_drafts: int) -> Iterator[Rival]:
        """Yield faults of drafting, each with a function that predicts the counters under it."""

        def rival(name: str, sentence: str, head: Head, draft_of: Callable[[Samples], Tensor | None]) -> Rival:
            cause = Cause(name, f"the served counters are those of the head {sentence}")
            return cause, lambda one: self._predict(one, head, draft_of(one.samples), num_drafts)

        for name in ("bfloat16", "float16"):
            rounded = self.attach(self.folder, self.target, getattr(torch, name)).head
            sentence = f"in {name}: precision costs this head its drafts; serve it in float32"
            yield rival("precision", sentence, rounded, lambda samples: samples.draft)
        shifts = {"before": lambda samples: samples.read.roll(1, 1), "after": lambda samples: samples.read.roll(-1, 1)}
        for side, shifted in shifts.items():
            sentence = f"with the hidden state of the position {side} the right one"
            yield rival("hidden state", sentence, self.head, shifted)
        if self.draft_layers is not None:
            sentence = "with the target's own hidden state, without its draft layers"
            yield rival("hidden state", sentence, self.head, lambda samples: None)

    def _predict(self, comparison: Comparison, head: Head, draft: Tensor | None, num_drafts: int) -> Metrics:
        samples = replace(comparison.samples, draft=draft)
        return summarise(collect(head, self.target, samples, comparison.sampling, num_drafts), overlap=False)

    def _chance(self, comparison: Comparison, num_drafts: int) -> float:
        """Return the acceptance at position 1 of drafts from hidden states of unrelated contexts."""
        samples, generator = comparison.samples, torch.Generator().manual_seed(0)
        known, states = (samples.tokens >= 0)[:, :-1], samples.read.clone()
        states[known] = samples.read[known][torch.randperm(int(known.sum()), generator=generator)]
        return self._predict(comparison, self.head, states, num_drafts).per_position[0]


def noise_given_text(contexts: Contexts) -> float:
    """Return the standard error of the tokens/step that a server counts, given the text: only its steps are random.

    Exact, by the first two moments of the sum over steps of (accepted - mean accepted). 0 for greedy text.
    """
    alive, valid = contexts.text, contexts.valid
    starts, (sequences, length, drafts) = step_starts(alive, valid), alive.shape
    mean = ((starts[..., None] * alive).sum() / starts.sum()).item()
    exactly = exact_counts(alive) * valid[..., None]  # [S, T, K + 1]
    gain = torch.arange(drafts + 1, dtype=alive.dtype) - mean
    first, second = alive.new_zeros(2, sequences, length + drafts + 1)  # moments of the sum from a step at t on
    for t in reversed(range(length)):
        ahead = slice(t + 1, t + drafts + 2)
        first[:, t] = (exactly[:, t] * (gain + first[:, ahead])).sum(1)
        second[:, t] = (exactly[:, t] * (gain**2 + 2 * gain * first[:, ahead] + second[:, ahead])).sum(1)
    return math.sqrt(max(0.0, (second - first**2)[:, 0].sum().item())) / starts.sum().item()
