"""The evaluator of PTP heads.

``doctor`` serves requests with seeds. Every u is known, and with it, up to rounding, the drafts that a server accepts:
the predicted counters equal the served ones.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_mtpc.checkpoint import read_config
from vllm_mtpc.checkpoint.ptp_head import load_student
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.engine.served import Served
from vllm_mtpc.eval.evaluator import Diagnosis, Evaluator, Requests
from vllm_mtpc.eval.metrics import StepMetrics, shown_shares, shown_tokens
from vllm_mtpc.eval.ptp_acceptance import PtpMetrics, collect, request_u, summarise, uses_u
from vllm_mtpc.eval.text import Samples, Sampling
from vllm_mtpc.heads.ptp.student import UNUSED_U, Student
from vllm_mtpc.hf import Target
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.plan.row_groups import VARIANTS


@dataclass(frozen=True)
class PtpEvaluation:
    """One temperature."""

    temperature: float
    figures: PtpMetrics
    uses_u: bool


@dataclass(frozen=True)
class PtpEvaluator(Evaluator):
    """A PTP head on its target."""

    folder: Path
    config: PtpConfig
    student: Student
    target: Target

    seeded, needs_modules = True, True

    @classmethod
    def attach(cls, folder: Path, target: Target) -> PtpEvaluator:
        return cls(folder, read_config(folder), load_student(folder, target), target)

    @staticmethod
    def default_sampling(config: PtpConfig) -> tuple[float, int, float]:
        """Return the sampling that the head was trained for: with another one u picks other tokens."""
        return config.trained_temperature, config.trained_top_k, config.trained_top_p

    @staticmethod
    def serving(args: Namespace, config: PtpConfig, num_drafts: int, max_num_seqs: int) -> dict[str, Any]:
        rows = num_drafts + 1  # of a request: no draft is pruned
        if args.draft_pass == "merged":
            rows *= num_drafts + VARIANTS[config.variant]
        return {"draft_pass": args.draft_pass or "two-pass", "max_aux_rows": max_num_seqs * rows}

    def evaluate(self, samples: Samples, sampling: Sampling, num_drafts: int, seed: int) -> PtpEvaluation:
        metrics = summarise(collect(self.student, samples, sampling, num_drafts, seed))
        is_read = uses_u(metrics.accuracy, metrics.shuffled_accuracy, metrics.contexts)
        return PtpEvaluation(sampling.temperature, metrics, is_read)

    def title(self, num_drafts: int) -> str:
        config = self.config
        return f"{self.folder}: {config.variant}, n={config.window}, r={config.lora_rank}, K={num_drafts} drafts"

    def rows(self, result: PtpEvaluation) -> dict[str, str]:
        figures = result.figures
        two_passes = f"{figures.two_pass_tokens_per_step:.3f} ± {figures.two_pass_standard_error:.3f}"
        return {
            "tokens/step, merged pass, ideal ± s.e.": shown_tokens(figures),
            "tokens/step, two passes": two_passes,
            "acceptance per position": shown_shares(figures.per_position),
            "P(exactly g drafts accepted)": shown_shares(figures.histogram),
            "right drafts, of all": f"{figures.accuracy:.3f}",
            "  with the u of other windows": f"{figures.shuffled_accuracy:.3f}",
            "texts, contexts": f"{figures.sequences}, {figures.contexts:,}",
        }

    def warnings(self, results: Sequence[PtpEvaluation]) -> list[str]:
        trained, found = self.default_sampling(self.config), []
        sampled = [result for result in results if result.temperature > 0]
        if self.config.uses_u and sampled and not any(result.uses_u for result in sampled):
            found.append(
                "warning: the drafts are no worse with the u of other windows, so the head does not read u; train it "
                "longer"
            )
        if self.config.uses_u and any(result.temperature != trained[0] for result in sampled):
            found.append(
                "note: the head was trained at temperature {:g}, top-k {}, top-p {:g}; elsewhere u means other tokens, "
                "and fewer drafts are right".format(*trained)
            )
        return found

    def compare(self, requests: Requests, served: Served) -> Diagnosis:
        """Compute the expected counters; the target continues each text with the u of its request."""
        sampling = self.sampling(served.temperature, requests.top_p, requests.top_k)
        pairs = zip(requests.prompts, served.outputs, strict=True)
        longest = max(len(prompt) + len(answer) for prompt, answer in pairs) + requests.num_drafts
        assert requests.seeds is not None  # `seeded`; numbers are of the tokens after the first one of each text
        numbers = request_u(sampling, requests.seeds, 1, longest, self.target.device)

        def coupled(first: int, lengths: list[int]) -> _Coupled:
            return _Coupled(sampling, numbers[first : first + len(lengths)], torch.tensor(lengths) - 1)

        samples = self.continue_served(requests, served, coupled)
        u = torch.nn.functional.pad(numbers.cpu(), (1, 0), value=UNUSED_U)[:, : samples.tokens.shape[1]]
        windows = collect(self.student, samples, sampling, requests.num_drafts, u=u)
        predicted = StepMetrics.of(*windows.steps(two_pass=requests.draft_pass != "merged"))
        return Diagnosis(served, predicted, 0.0, self.check_chain(samples, sampling, u))


class _Coupled:
    """A ``Sampling`` that picks tokens by u[B, L], starting at the columns at[B]."""

    def __init__(self, sampling: Sampling, u: Tensor, at: Tensor) -> None:
        self.sampling, self.log_probs, self.u, self.at = sampling, sampling.log_probs, u, at.to(u.device)

    def pick(self, log_probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        u = self.u.gather(1, self.at[:, None])[:, 0]
        self.at = self.at + 1
        return log_probs.argmax(-1) if self.sampling.greedy else pick(log_probs, u)
