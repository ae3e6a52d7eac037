"""Expected tokens/step of PTP heads, computed on the target's own text.

A server picks token x_k by u_k: x_k = Pick(u_k, Q_k), Q_k the target's processed distribution (Parallel Token
Prediction, section 2.1). Given the text, u_k is uniform on the interval of x_k and independent of everything else; so a
text of the target with u_k drawn uniformly inside the interval of x_k has the joint distribution of a server, and the
accepted drafts follow without a further pass of the target. Greedy: the text is the argmax, rows carry 0.5.

A window at position t (visible: tokens up to t) drafts x_2..x_(1+K), tokens t + 2..t + 1 + K; x_1 is the target's own.
o-ptp and the independent baseline: the argmax of rows 1..K. c-ptp: Pick(u, P), P the distributions of rows 0..K - 1
(greedy: argmax). late: see `vllm_mtpc.heads.ptp.distribution`. The step accepts the leading drafts that equal the text.

Steps follow each other through each continuation (`vllm_mtpc.eval.metrics`):

    merged pass   window at t; the next step is at t + 1 + accepted; every group of rows long enough (ideal)
    two passes    window at t + 1, after x_1, whose row gives x_2 exactly; the student drafts the K - 1 tokens after it
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_mtpc.eval.metrics import StepMetrics, check_drafts, exact_counts, step_starts
from vllm_mtpc.eval.text import Samples, Sampling
from vllm_mtpc.heads.ptp.distribution import STEPS, draft_tokens, edges, u_inside
from vllm_mtpc.heads.ptp.student import UNUSED_U, Student
from vllm_mtpc.kernels.uniform import uniform

CHUNK_ELEMENTS = 2**24  # scores or logits of one pass: 64 MiB in float32
PREFIX_ELEMENTS = 2**26  # keys and values kept at once


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

    Args:
        student: The head on its target.
        samples: Texts that the target wrote with the same ``sampling``.
        sampling: Of text and drafts.
        num_drafts: K; None: as served.
        seed: Of the u inside their intervals.
        u: [S, L], u[:, k] picked tokens[:, k]; None: drawn inside the intervals.

    Raises:
        UsageError: No text is long enough for a step.
    """
    config = student.config
    drafts = check_drafts(config.window, num_drafts, config.num_speculative_tokens)
    first, count = samples.starts(drafts)
    u = u_of_text(student, samples, sampling, seed) if u is None else u.cpu().float()
    shape = (len(count), int(count.max()) + 1, drafts)
    right, shuffled = torch.zeros(2, *shape, dtype=torch.bool)
    has_u = config.uses_u and not sampling.greedy  # else all numbers are equal, or none is read
    generator, rows = torch.Generator().manual_seed(seed), draft_rows(student, drafts)
    # Where rows do not carry u, the numbers that pick from their distributions are shuffled as well.
    is_plain = config.variant != "late"
    prefix_elements = 2 * student.target.config.num_hidden_layers * student.target.hidden_size * samples.tokens.shape[1]
    for texts in _parts(len(count), PREFIX_ELEMENTS, prefix_elements):
        tokens, columns = samples.tokens[texts], torch.arange(shape[1])
        row, column = ((columns <= count[texts, None]) & (count[texts, None] > 0)).nonzero(as_tuple=True)
        if not len(row):
            continue
        start = first[texts][row] + column
        prefix = student.prefix(tokens.clamp(min=0))
        numbers = _shifted(u[texts], row, start, drafts + 2)  # [B, K + 2]: u_(t+1)..u_(t+2+K), which pick
        wanted, x_1 = _shifted(tokens, row, start + 1, drafts), tokens[row, start + 1]  # [B, K], [B]
        others = numbers[torch.randperm(len(numbers), generator=generator)]
        cases = ((right, numbers, numbers), (shuffled, others, numbers if is_plain else others))
        for found, shown, picks in cases if has_u else cases[:1]:
            for part in chunks(student, prefix.hidden.shape[1], rows.stop, len(row)):
                hidden = student.aux(prefix, row[part], start[part], shown[part, : rows.stop])[:, rows]
                drafted = draft(student, hidden, picks[part, 1 : drafts + 1], sampling.greedy, x_1[part]).cpu()
                found[texts.start + row[part], column[part]] = drafted == wanted[part]
    return DraftedWindows(right, shuffled if has_u else right, torch.arange(shape[1] - 1) < count[:, None])


def u_of_text(student: Student, samples: Samples, sampling: Sampling, seed: int) -> Tensor:
    """Draw u [S, L] float32, on the CPU, uniform inside the intervals of the tokens after each prompt; greedy: 0.5."""
    u = torch.full(samples.tokens.shape, UNUSED_U)
    if sampling.greedy:
        return u
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(STEPS, samples.tokens.shape, generator=generator).double() / STEPS
    drawn = (samples.tokens >= 0) & (torch.arange(samples.tokens.shape[1]) >= samples.prompt_lengths[:, None])
    rows, columns = drawn.nonzero(as_tuple=True)
    device = student.target.device
    for part in _parts(len(rows), CHUNK_ELEMENTS, student.target.vocab_size):
        row, column = rows[part], columns[part]
        log_q = sampling.log_probs(student.logits(samples.hidden[row, column - 1].to(device)))
        left, right = edges(log_q, samples.tokens[row, column].to(device))
        u[row, column] = u_inside(left, right, inner[row, column].to(device)).cpu()
    return u


def draft(student: Student, hidden: Tensor, u: Tensor, greedy: bool, first: Tensor) -> Tensor:
    """Return drafts [B, K] from the states hidden[B, K, D] of their rows, after x_1 = first[B].

    u[B, K] picks them (c-ptp, late).
    """
    u = u.to(hidden.device)

    def choose(logits: Tensor, numbers: Tensor) -> Tensor:
        return logits.argmax(-1) if greedy else draft_tokens(student.config, logits, numbers)

    if student.late is not None:
        return student.chain(hidden, first, lambda state, k: choose(student.logits(state), u[:, k]))
    return choose(student.logits(hidden).flatten(0, 1), u.flatten()).view(u.shape)


def draft_rows(student: Student, num_drafts: int) -> slice:
    """Return the rows of a window that give its drafts; the first row of o-ptp gives x_1."""
    return slice(student.first_row, student.first_row + num_drafts)


def chunks(student: Student, length: int, rows: int, count: int) -> Iterator[slice]:
    """Split ``count`` windows of ``rows`` rows after up to ``length`` tokens into parts that fit in memory."""
    scores = (length + rows) * student.target.config.num_attention_heads
    return _parts(count, CHUNK_ELEMENTS, rows * max(scores, student.target.vocab_size))


def _parts(count: int, elements: int, each: int) -> Iterator[slice]:
    size = max(1, elements // each)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _shifted(values: Tensor, row: Tensor, start: Tensor, count: int) -> Tensor:
    """Return values[row, start + 1 .. start + count], [B, count]; past the end the last one."""
    at = start[:, None] + 1 + torch.arange(count)
    return values[row[:, None], at.clamp(max=values.shape[1] - 1)]


def summarise(windows: DraftedWindows) -> PtpMetrics:
    """Return the metrics of all texts."""
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


def request_u(sampling: Sampling, seeds: Sequence[int], first: int, count: int, device: torch.device) -> Tensor:
    """Return u [B, count] float32 of the tokens first .. first + count - 1 of B requests with seeds; greedy: 0.5."""
    if sampling.greedy:
        return torch.full((len(seeds), count), UNUSED_U, device=device)
    at = torch.arange(first - 1, first + count - 1, device=device)
    return torch.stack([uniform(torch.full_like(at, seed), at) for seed in seeds])
