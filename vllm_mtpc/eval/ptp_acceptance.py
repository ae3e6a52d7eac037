"""Tokens/step of a PTP head under the serving rule, computed on the target's own text.

A server picks token x_k by u_k: x_k = Pick(u_k, Q_k), Q_k the target's processed distribution (Parallel Token
Prediction, section 2.1). Given the text, u_k is uniform on the interval of x_k and independent of everything else; so a
text of the target with u_k drawn uniformly inside the interval of x_k is distributed as what a server does, and which
drafts it accepts is known without a further pass of the target. Greedy: the text is the argmax, rows carry 0.5.

A window at position t (visible: tokens up to t) drafts x_2..x_(1+K), tokens t + 2..t + 1 + K; x_1 is the target's own.
o-ptp: the argmax of rows 1..K. c-ptp: Pick(u, P), P what rows 0..K - 1 give (greedy, and heads that were trained
without u: its argmax). Heads with `law_trust` pick as `vllm_mtpc.heads.ptp.distribution` says. The step accepts the
leading drafts that are the text.

Steps follow each other through each continuation, and tokens/step is the number of tokens by the number of steps:

    merged pass   window at t; the next step is at t + 1 + accepted; every group of rows long enough (ideal)
    two passes    window at t + 1, behind x_1, whose own row gives x_2 for certain; the student drafts K - 1 behind it

A server starts no step once a text has ended and counts the drafts of its last step also past the end: so it is here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_mtpc.eval.metrics import check_drafts, ratio, reached
from vllm_mtpc.heads.ptp.distribution import STEPS, draft_tokens, edges, u_inside

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mtpc.eval.sampling import Sampling
    from vllm_mtpc.eval.text import Samples
    from vllm_mtpc.heads.ptp.student import Student

CHUNK_ELEMENTS = 2**24  # scores or logits of one pass: 64 MiB in float32
PREFIX_ELEMENTS = 2**26  # keys and values kept at once


@dataclass(frozen=True)
class PtpMetrics:
    """What one head does at one temperature. s.e.: standard error over sequences."""

    tokens_per_step: float  # merged pass, ideal; the target's own token included, plain decoding is 1.0
    standard_error: float
    per_position: list[float]  # unconditional: P(drafts 1..k are all accepted), k = 1..K, over steps
    histogram: list[float]  # P(exactly g of K drafts are accepted), g = 0..K, over steps
    two_pass_tokens_per_step: float
    two_pass_standard_error: float
    accuracy: float  # drafts that are the text's token, of all drafts of all windows, whatever those before them are
    shuffled_accuracy: float  # the same where rows carry the u of another window
    anywhere: float  # expected tokens of a step started at a uniformly chosen position
    sequences: int
    contexts: int
    steps: float  # number of merged steps

    def as_dict(self) -> dict[str, object]:
        """For provenance files."""
        return asdict(self)


class Windows(NamedTuple):
    """Drafts at every position of some texts where a step may start, and one behind; S texts, T positions, K drafts."""

    right: Tensor  # [S, T + 1, K] bool: the draft is the text's token
    shuffled: Tensor  # [S, T + 1, K] bool: the same with the u of other windows
    valid: Tensor  # [S, T] bool

    @property
    def leading(self) -> Tensor:
        """Leading drafts that are right [S, T + 1], 0..K."""
        return self.right.long().cumprod(-1).sum(-1)


class Steps(NamedTuple):
    """Steps of some texts counted."""

    count: Tensor  # [S] float64
    tokens: Tensor  # [S] float64, the drafts of a last step included where they pass the end
    histogram: Tensor  # [K + 1] float64, steps by accepted drafts


def measure_ptp(
    student: Student, samples: Samples, sampling: Sampling, num_drafts: int | None = None, seed: int = 0
) -> PtpMetrics:
    """Metrics of a head on texts that its target wrote with the same ``sampling``; ``num_drafts``: K (None: as served).

    ``seed``: of the u inside their intervals. Raises UsageError where no text is long enough for a step.
    """
    return summarise(collect(student, samples, sampling, num_drafts, seed))


@torch.inference_mode()
def collect(
    student: Student,
    samples: Samples,
    sampling: Sampling,
    num_drafts: int | None = None,
    seed: int = 0,
    u: Tensor | None = None,
    carried: Tensor | None = None,
) -> Windows:
    """Drafts at every position where a server may start a step (``Samples.starts``), and at one more of each text.

    ``u`` [S, L]: those the text was picked by, where they are known (u[:, k] picked tokens[:, k]). ``carried`` [S, L]:
    what rows carry in their place.
    """
    config = student.config
    drafts = config.num_speculative_tokens if num_drafts is None else check_drafts(config.window, num_drafts)
    first, count = samples.starts(drafts)
    u = u_of_text(student, samples, sampling, seed) if u is None else u.cpu().float()
    carried = u if carried is None else carried.cpu().float()
    shape = (len(count), int(count.max()) + 1, drafts)
    right, shuffled = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    generator, rows = torch.Generator().manual_seed(seed), draft_rows(student, drafts)
    # Where not the rows alone make drafts good (a late network, `law_trust`), u is foreign to Pick as well.
    is_plain = student.late is None and config.law_trust is None
    for texts in _texts(student, samples):
        tokens, columns = samples.tokens[texts], torch.arange(shape[1])
        row, column = ((columns <= count[texts, None]) & (count[texts, None] > 0)).nonzero(as_tuple=True)
        if not len(row):
            continue
        start = first[texts][row] + column
        prefix = student.prefix(tokens.clamp(min=0))
        own = _shifted(u[texts], row, start, drafts + 2)  # [B, K + 2]: u_(t+1)..u_(t+2+K), what picks
        on_rows = _shifted(carried[texts], row, start, drafts + 2)
        wanted, x_1 = _shifted(tokens, row, start + 1, drafts), tokens[row, start + 1]  # [B, K], [B]
        order = torch.randperm(len(on_rows), generator=generator)
        others = (on_rows[order], own if is_plain else own[order])
        for found, (shown, picks) in ((right, (on_rows, own)), (shuffled, others)):
            for part in chunks(student, prefix.hidden.shape[1], rows.stop, len(row)):
                hidden = student.aux(prefix, row[part], start[part], shown[part, : rows.stop])[:, rows]
                drafted = draft(student, hidden, picks[part, 1 : drafts + 1], sampling.greedy, x_1[part]).cpu()
                found[texts.start + row[part], column[part]] = drafted == wanted[part]
    return Windows(right, shuffled, torch.arange(shape[1] - 1) < count[:, None])


def u_of_text(student: Student, samples: Samples, sampling: Sampling, seed: int) -> Tensor:
    """u [S, L] float32, on the CPU: uniform inside the intervals of the tokens behind each prompt; greedy: 0.5."""
    u = torch.full(samples.tokens.shape, 0.5)
    if sampling.greedy:
        return u
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(STEPS, samples.tokens.shape, generator=generator).double() / STEPS
    drawn = (samples.tokens >= 0) & (torch.arange(samples.tokens.shape[1]) >= samples.prompt_lengths[:, None])
    rows, columns = drawn.nonzero(as_tuple=True)
    size = max(1, CHUNK_ELEMENTS // student.target.vocab_size)
    device = student.target.device
    for row, column in zip(rows.split(size), columns.split(size), strict=True):
        log_q = sampling.log_probs(student.logits(samples.hidden[row, column - 1].to(device)))
        left, right = edges(log_q, samples.tokens[row, column].to(device))
        u[row, column] = u_inside(left, right, inner[row, column].to(device)).cpu()
    return u


def draft(student: Student, hidden: Tensor, u: Tensor, greedy: bool, first: Tensor) -> Tensor:
    """Drafts [B, K] from the states hidden[B, K, D] of the rows that give them, behind x_1 first[B].

    u[B, K] picks them (c-ptp, heads with law_trust).
    """
    u = u.to(hidden.device)

    def choose(logits: Tensor, numbers: Tensor) -> Tensor:
        return logits.argmax(-1) if greedy else draft_tokens(student.config, logits, numbers)

    if student.late is not None:
        return student.chain(hidden, first, lambda state, k: choose(student.logits(state), u[:, k]))
    return choose(student.logits(hidden).flatten(0, 1), u.flatten()).view(u.shape)


def draft_rows(student: Student, num_drafts: int) -> slice:
    """The rows of a window that give its drafts: the first of o-ptp says which token x_1 is."""
    return slice(student.first_row, student.first_row + num_drafts)


def chunks(student: Student, length: int, rows: int, count: int) -> Iterator[slice]:
    """``count`` windows of ``rows`` rows behind up to ``length`` tokens, in parts that fit in memory."""
    config = student.target.config
    scores = (length + rows) * config.num_attention_heads
    size = max(1, CHUNK_ELEMENTS // (rows * max(scores, student.target.vocab_size)))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _texts(student: Student, samples: Samples) -> Iterator[slice]:
    """Texts whose keys and values fit in memory together."""
    config = student.target.config
    each = 2 * config.num_hidden_layers * student.target.hidden_size * samples.tokens.shape[1]
    size = max(1, PREFIX_ELEMENTS // each)
    for start in range(0, len(samples.tokens), size):
        yield slice(start, min(start + size, len(samples.tokens)))


def _shifted(values: Tensor, row: Tensor, start: Tensor, count: int) -> Tensor:
    """values[row, start + 1 .. start + count], [B, count]; past the end the last one."""
    at = start[:, None] + 1 + torch.arange(count)
    return values[row[:, None], at.clamp(max=values.shape[1] - 1)]


def follow(windows: Windows, two_pass: bool = False, after: Tensor | None = None) -> Steps:
    """Steps through each text. ``after``[K + 1]: drafts of the next step behind each number of accepted ones.

    ``after`` None: always K. The first step of a text has those behind none, as if a step had ended with the prompt.
    """
    leading, valid = windows.leading, torch.nn.functional.pad(windows.valid, (0, 1))
    texts, drafts = len(leading), windows.right.shape[-1]
    if two_pass:  # window t + 1 has its first draft, x_2, from the target's own row
        leading = 1 + torch.nn.functional.pad(leading[:, 1:], (0, 1)).clamp(max=drafts - 1)
    after = torch.full((drafts + 1,), drafts) if after is None else after
    row, at = torch.arange(texts), torch.zeros(texts, dtype=torch.long)
    state = after[at]
    count, tokens = torch.zeros(texts, dtype=torch.float64), torch.zeros(texts, dtype=torch.float64)
    histogram = torch.zeros(drafts + 1, dtype=torch.float64)
    while bool((runs := valid[row, at]).any()):
        accepted = torch.minimum(leading[row, at], state)
        count += runs
        tokens += runs * (1 + accepted)
        histogram.index_add_(0, accepted[runs], torch.ones(int(runs.sum()), dtype=torch.float64))
        at = (at + torch.where(runs, 1 + accepted, 0)).clamp(max=valid.shape[1] - 1)
        state = torch.where(runs, after[accepted], state)
    return Steps(count, tokens, histogram)


def summarise(windows: Windows) -> PtpMetrics:
    """Metrics of all texts together."""
    merged, two_pass = follow(windows), follow(windows, two_pass=True)
    value, error = ratio(merged.tokens, merged.count)
    two_value, two_error = ratio(two_pass.tokens, two_pass.count)
    valid = windows.valid
    return PtpMetrics(
        tokens_per_step=value,
        standard_error=error,
        per_position=reached(merged.histogram),
        histogram=(merged.histogram / merged.histogram.sum()).tolist(),
        two_pass_tokens_per_step=two_value,
        two_pass_standard_error=two_error,
        accuracy=windows.right[:, :-1][valid].double().mean().item(),
        shuffled_accuracy=windows.shuffled[:, :-1][valid].double().mean().item(),
        anywhere=1 + windows.leading[:, :-1][valid].double().mean().item(),
        sequences=len(valid),
        contexts=int(valid.sum()),
        steps=merged.count.sum().item(),
    )


def uses_u(metrics: PtpMetrics) -> bool:
    """Whether a head that should read u does: its drafts are clearly worse with the u of other windows."""
    accuracy, shuffled = metrics.accuracy, metrics.shuffled_accuracy
    noise = math.sqrt(max(accuracy * (1 - accuracy), 1e-12) / max(1, metrics.contexts))
    return accuracy - shuffled > max(0.02 * accuracy, 5 * noise)
