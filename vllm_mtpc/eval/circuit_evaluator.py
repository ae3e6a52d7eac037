"""The evaluator of circuit heads."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.load import load_head, read_adapters
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.acceptance import Contexts, Metrics, collect, summarise
from vllm_mtpc.eval.evaluator import Evaluator, Requests
from vllm_mtpc.eval.metrics import exact_counts, shown_shares, shown_tokens, step_starts
from vllm_mtpc.eval.text import Samples, Sampling
from vllm_mtpc.heads.head import Head
from vllm_mtpc.heads.trunk.lora import LoraDraftLayers
from vllm_mtpc.hf import Target, bind


@dataclass(frozen=True)
class Evaluation:
    """Results of one temperature."""

    temperature: float
    expected: Metrics  # last factor of each product averaged over the target's distribution
    along_text: Metrics  # the expectation given these texts

    @property
    def figures(self) -> Metrics:
        return self.expected


@dataclass(frozen=True)
class MtpcEvaluator(Evaluator):
    """A circuit head in float32 on its target's device."""

    folder: Path
    config: HeadConfig
    head: Head
    target: Target
    draft_layers: LoraDraftLayers | None = None

    @classmethod
    def attach(cls, folder: Path, target: Target) -> MtpcEvaluator:
        config, head = load_head(folder, device=target.device)
        bind(head, target)
        layers = LoraDraftLayers.load(read_adapters(folder, config), target) if config.lora_layers else None
        return cls(folder, config, head, target, layers)

    @staticmethod
    def serving(args: Namespace, config: HeadConfig, num_drafts: int, max_num_seqs: int) -> dict[str, Any]:
        if args.draft_pass:
            raise UsageError("--draft-pass: circuits draft without a pass; leave it out, or name a PTP head")
        return {}

    def sampling(self, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampling:
        return Sampling(temperature, top_p, self.config.draft_sample_method == "greedy", top_k)

    def evaluate(self, samples: Samples, sampling: Sampling, num_drafts: int, seed: int) -> Evaluation:
        contexts = collect(self.head, self.target, self._read(samples), sampling, num_drafts)
        return Evaluation(sampling.temperature, summarise(contexts), summarise(contexts, overlap=False))

    def title(self, num_drafts: int) -> str:
        config = self.config
        parts = f"{config.trunk.kind} x {config.leaves.kind} x {config.circuit.kind}"
        return f"{self.folder}: {parts}, n={config.window}, r={config.num_components}, K={num_drafts} drafts"

    def rows(self, result: Evaluation) -> dict[str, str]:
        expected = result.expected
        return {
            "tokens/step, expected ± s.e.": shown_tokens(expected),
            "  given these texts": shown_tokens(result.along_text),
            "  from any position": f"{expected.anywhere:.3f}",
            "acceptance per position": shown_shares(expected.per_position),
            "bits per token, target": f"{expected.target_bits:.3f}",
            "bits per token, circuit's joint": "-" if expected.joint_bits is None else f"{expected.joint_bits:.3f}",
            "tokens in the draft vocabulary": f"{expected.coverage:.2%}",
            "texts, contexts": f"{expected.sequences}, {expected.contexts:,}",
        }

    def predict(
        self, samples: Samples, sampling: Sampling, requests: Requests, u: Tensor | None
    ) -> tuple[Metrics, float]:
        contexts = collect(self.head, self.target, self._read(samples), sampling, requests.num_drafts)
        return summarise(contexts, overlap=False), noise_given_text(contexts)

    @torch.inference_mode()
    def _read(self, samples: Samples) -> Samples:
        """Add the states that the trunk reads, if they are not the target's last ones."""
        layers, draft_layers = self.head.trunk.aux_layers, self.draft_layers
        if not layers and draft_layers is None:
            return samples

        def states(tokens: Tensor) -> Tensor:
            if draft_layers is not None:
                return draft_layers.draft(draft_layers.trunk(tokens))
            return self.target.hidden_with(layers, tokens)

        parts = samples.tokens.clamp(min=0).split(self.target.rows_at_once)
        read = [states(tokens)[:, :-1].to(samples.hidden.dtype).cpu() for tokens in parts]
        return replace(samples, draft=torch.cat(read))


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
