"""The evaluator of PTP heads: expected tokens/step, computed on the target's own text.

A server picks token x_k by u_k: x_k = Pick(u_k, Q_k), Q_k the target's processed distribution (Parallel Token
Prediction, section 2.1). Given the text, u_k is uniform on the interval of x_k and independent of everything else; so a
text of the target with u_k drawn uniformly inside the interval of x_k has the joint distribution of a server, and the
accepted drafts follow without a further pass of the target. Greedy: the text is the argmax, rows carry 0.5.

A window at position t (visible: tokens up to t) drafts x_2..x_(1+K), tokens t + 2..t + 1 + K; x_1 is the target's own.
o-ptp and the independent baseline: the argmax of rows 1..K. c-ptp: Pick(u, P), P the distributions of rows 0..K - 1
(greedy: argmax). late: see `vllm_mtpc.heads.ptp.distribution`. The step accepts the leading drafts that equal the text.

Steps follow each other through each continuation (`vllm_mtpc.eval.evaluator`):

    merged pass   window at t; the next step is at t + 1 + accepted; every group of rows long enough (ideal)
    two passes    window at t + 1, after x_1, whose row gives x_2 exactly; the student drafts the K - 1 tokens after it

``doctor`` serves requests with seeds. Every u is known, and with it, up to rounding, the drafts that a server accepts:
the predicted counters equal the served ones.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_mtpc.checkpoint import read_config
from vllm_mtpc.checkpoint.ptp_head import load_student
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.eval.evaluator import (
    Evaluator,
    Requests,
    StepMetrics,
    check_drafts,
    exact_counts,
    shown_shares,
    step_starts,
)
from vllm_mtpc.eval.text import Samples, Sampling
from vllm_mtpc.heads.ptp.distribution import STEPS, edges, u_inside
from vllm_mtpc.heads.ptp.student import UNUSED_U, Student
from vllm_mtpc.hf import Target

CHUNK_ELEMENTS = 2**24  # scores or logits of one pass: 64 MiB in float32


@dataclass(frozen=True, kw_only=True)
class PtpMetrics(StepMetrics):
    """Metrics of a PTP head; the steps are those of an ideal merged pass."""

    histogram: list[float]  # P(exactly g of K drafts are accepted), g = 0..K, over steps
    two_pass_tokens_per_step: float
    two_pass_standard_error: float
    accuracy: float  # share of right drafts over all windows, whether or not those before them are right
    shuffled_accuracy: float  # the same where rows carry the u of another window
    shuffled_tokens_per_step: float  # merged, likewise
    anywhere: float  # expected tokens of a step started at a uniformly chosen position
    contexts: int


class DraftedWindows(NamedTuple):
    """Drafts at every position of S texts where a step may start, and one more; T positions, K drafts."""

    right: Tensor  # [S, T + 1, K] bool: the draft is the text's token
    shuffled: Tensor  # [S, T + 1, K] bool: the same with the u of other windows
    valid: Tensor  # [S, T] bool

    def steps(self, two_pass: bool = False) -> tuple[Tensor, Tensor]:
        """Return the steps along the texts, the arguments of ``StepMetrics.of``."""
        alive = self.right.cumprod(-1).double()
        if two_pass:  # the first draft, x_2, is from the target's own row; the others are those of the next window
            alive = torch.nn.functional.pad(alive[:, 1:, :-1], (1, 0), value=1.0)
        alive = alive[:, : self.valid.shape[1]]
        return step_starts(alive, self.valid), alive


@torch.inference_mode()
def collect(
    student: Student,
    samples: Samples,
    sampling: Sampling,
    num_drafts: int | None = None,
    seed: int = 0,
    u: Tensor | None = None,
) -> DraftedWindows:
    """Draft at every position where a server may start a step (``Samples.starts``), and at one more of each text.

    ``num_drafts``: K; None: as served. u[S, L]: u[:, k] picked tokens[:, k]; None: drawn inside the intervals. Raises
    UsageError where no text is long enough for a step.
    """
    config = student.config
    drafts = check_drafts(config.window, num_drafts, config.num_speculative_tokens)
    first, count = samples.starts(drafts)
    u = u_of_text(student, samples, sampling, seed) if u is None else u.cpu().float()
    positions = torch.arange(int(count.max()) + 1)
    right, shuffled = torch.zeros(2, len(count), len(positions), drafts, dtype=torch.bool)
    has_u = config.uses_u and not sampling.greedy  # else all numbers are equal, or none is read
    row, column = ((positions <= count[:, None]) & (count[:, None] > 0)).nonzero(as_tuple=True)  # [B], all windows
    start = first[row] + column
    numbers = _following(u, row, start, 1 + drafts)  # [B, 1 + K], which pick x_1 and the next
    wanted, x_1 = _following(samples.tokens, row, start + 1, drafts), samples.tokens[row, start + 1]  # [B, K], [B]
    others = numbers[torch.randperm(len(row), generator=torch.Generator().manual_seed(seed))]
    # Where rows do not carry u, the numbers that pick from their distributions are shuffled.
    cases = ((right, numbers, numbers), (shuffled, others, numbers if config.informed else others))
    for text in row.unique().tolist():
        prefix = student.prefix(samples.tokens[text : text + 1].clamp(min=0))
        windows = (row == text).nonzero()[:, 0]
        for part in windows.split(windows_at_once(student, samples.tokens.shape[1], 1 + drafts)):
            place = prefix, torch.zeros_like(part), start[part]
            for found, shown, picks in cases if has_u else cases[:1]:
                made = student.draft(*place, shown[part], x_1[part], sampling.greedy, picks[part])
                found[text, column[part]] = made.cpu() == wanted[part]
    return DraftedWindows(right, shuffled if has_u else right, positions[:-1] < count[:, None])


def u_of_text(student: Student, samples: Samples, sampling: Sampling, seed: int) -> Tensor:
    """Draw u [S, L] float32, on the CPU, uniform inside the intervals of the tokens after each prompt; greedy: 0.5."""
    u = torch.full(samples.tokens.shape, UNUSED_U)
    if sampling.greedy:
        return u
    inner = torch.randint(STEPS, u.shape, generator=torch.Generator().manual_seed(seed)).double() / STEPS
    known = (samples.tokens >= 0).sum(1)
    for row, (begin, end) in enumerate(zip(samples.prompt_lengths.tolist(), known.tolist(), strict=True)):
        logits = student.logits(samples.hidden[row, begin - 1 : end - 1].to(student.target.device))
        tokens, place = samples.tokens[row, begin:end].to(logits.device), slice(begin, end)
        u[row, place] = u_inside(*edges(sampling.log_probs(logits), tokens), inner[row, place].to(logits.device)).cpu()
    return u


def windows_at_once(student: Student, length: int, rows: int) -> int:
    """Return the windows of ``rows`` rows after up to ``length`` tokens that are computed in one pass."""
    scores = (length + rows) * student.target.config.num_attention_heads
    return max(1, CHUNK_ELEMENTS // (rows * max(scores, student.target.vocab_size)))


def _following(values: Tensor, row: Tensor, start: Tensor, count: int) -> Tensor:
    """Return values[row, start + 1 .. start + count], [B, count]; past the end the last one."""
    at = start[:, None] + 1 + torch.arange(count)
    return values[row[:, None], at.clamp(max=values.shape[1] - 1)]


def summarise(windows: DraftedWindows) -> PtpMetrics:
    valid, (starts, alive) = windows.valid, windows.steps()
    histogram = (starts[..., None] * exact_counts(alive)).sum((0, 1)) / starts.sum()
    two_pass = StepMetrics.of(*windows.steps(two_pass=True))
    return PtpMetrics.of(
        starts,
        alive,
        histogram=histogram.tolist(),
        two_pass_tokens_per_step=two_pass.tokens_per_step,
        two_pass_standard_error=two_pass.standard_error,
        accuracy=windows.right[:, :-1][valid].double().mean().item(),
        shuffled_accuracy=windows.shuffled[:, :-1][valid].double().mean().item(),
        shuffled_tokens_per_step=StepMetrics.of(*windows._replace(right=windows.shuffled).steps()).tokens_per_step,
        anywhere=1 + alive[valid].sum(-1).mean().item(),
        contexts=int(valid.sum()),
    )


def uses_u(accuracy: float, shuffled: float, contexts: int) -> bool:
    """Return whether a head reads u: its drafts are clearly worse with the u of other windows."""
    noise = math.sqrt(max(accuracy * (1 - accuracy), 1e-12) / max(1, contexts))
    return accuracy - shuffled > max(0.02 * accuracy, 5 * noise)


@dataclass(frozen=True)
class PtpEvaluation:
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
            rows *= num_drafts + config.first_row
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
            "tokens/step, merged pass, ideal ± s.e.": figures.shown,
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

    def predict(
        self, samples: Samples, sampling: Sampling, requests: Requests, u: Tensor | None
    ) -> tuple[StepMetrics, float]:
        windows = collect(self.student, samples, sampling, requests.num_drafts, u=u)
        return StepMetrics.of(*windows.steps(two_pass=requests.draft_pass != "merged")), 0.0
