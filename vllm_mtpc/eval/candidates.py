"""M candidates per step: several u-sequences are drafted and verified, one is kept (PTP paper, appendix E).

A step knows the text up to x_1 and the u that picked it. Each of M candidates draws u of its own for the tokens behind,
drafts x_2..x_(1+K) from them, and has them verified in one pass of the target: t_k = Pick(u_k, Q_k(. | drafts before
k)). The candidate that is kept is the one whose u lie nearest to the middle of their intervals,

    argmin_m sum_k |f_k - 1/2|,   f_k = (u_k - F_left) / (F_right - F_left) of t_k

(the paper's equation 18 has argmax and the ends exchanged). Its accepted drafts and the t_k behind them, which is the
next x_1, become text; every u behind that is drawn anew.

The distribution of the text is the target's: given all drafts and tokens before k, f_k is uniform and independent of
t_k. So the f of a candidate are independent of the text it writes, and choosing by any function of the f does not
change its distribution. Choosing by anything that looks at tokens does, and so would the u behind the first wrong draft
if they were kept: their f belong to another text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.metrics import check_drafts, ratio, reached
from vllm_mtpc.eval.ptp_acceptance import chunks, draft, draft_rows
from vllm_mtpc.heads.ptp.distribution import STEPS, edges
from vllm_mtpc.kernels.pick import pick

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mtpc.eval.sampling import Sampling
    from vllm_mtpc.heads.ptp.student import Prefix, Student


@dataclass(frozen=True)
class CandidateMetrics:
    """What M candidates give; s.e.: standard error over texts."""

    candidates: int
    tokens_per_step: float  # the target's own token included
    standard_error: float
    per_position: list[float]  # unconditional: P(drafts 1..k are all accepted), k = 1..K, over steps
    sequences: int
    steps: int


def measure_candidates(
    student: Student,
    prompts: Sequence[Tensor],
    candidates: int,
    new_tokens: int,
    sampling: Sampling,
    num_drafts: int | None = None,
    seed: int = 0,
) -> CandidateMetrics:
    """Tokens/step over ``new_tokens`` behind each 1-D prompt. Raises UsageError where candidates are of no use."""
    histogram = write(student, prompts, candidates, new_tokens, sampling, num_drafts, seed).histogram
    steps, drafts = histogram.sum(1), torch.arange(histogram.shape[1], dtype=torch.float64)
    tokens_per_step = ratio(steps + histogram @ drafts, steps)
    per_position = reached(histogram.sum(0))
    return CandidateMetrics(candidates, *tokens_per_step, per_position, len(prompts), int(steps.sum()))


@torch.inference_mode()
def write(
    student: Student,
    prompts: Sequence[Tensor],
    candidates: int,
    new_tokens: int,
    sampling: Sampling,
    num_drafts: int | None = None,
    seed: int = 0,
) -> Written:
    """Continues prompts by ``new_tokens`` tokens, whatever they are."""
    if candidates < 1 or sampling.greedy:
        raise UsageError(
            f"{candidates} candidates at temperature {sampling.temperature:g}: allowed are 1 and above; greedy text "
            "has no u to choose; raise --candidates, or leave it out"
        )
    config = student.config
    drafts = config.num_speculative_tokens if num_drafts is None else check_drafts(config.window, num_drafts)
    texts = Written(student, prompts, new_tokens, drafts, sampling, seed)
    running = torch.arange(len(prompts))
    label = f"T={sampling.temperature:g} M={candidates}"
    with tqdm(total=len(prompts), desc=label, unit="text", disable=None) as bar:
        while len(running):
            texts.step(running, candidates)
            running = running[texts.lengths[running] < texts.longest[running]]
            bar.update(len(prompts) - len(running) - bar.n)
    texts.tokens[torch.arange(texts.tokens.shape[1]) >= texts.longest[:, None]] = -1
    return texts


def choose(off: Tensor, accepted: Tensor) -> Tensor:
    """The candidate [R] that is kept, by the criterion off[R, M]; accepted[R, M] drafts must play no part."""
    return off.argmin(1)


class Written:
    """Texts that are written with candidates: all tokens up to x_1, and the u that picked it.

    tokens: [S, L] int64, prompts included, -1 behind the end; histogram: [S, K + 1] float64, steps by accepted drafts.
    """

    def __init__(
        self, student: Student, prompts: Sequence[Tensor], new_tokens: int, drafts: int, sampling: Sampling, seed: int
    ) -> None:
        self.student, self.sampling, self.drafts = student, sampling, drafts
        self.generator = torch.Generator().manual_seed(seed)
        count = len(prompts)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts])
        self.longest = self.lengths + new_tokens
        self.tokens = torch.zeros(count, int(self.longest.max()) + drafts + 2, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = prompt
        self.histogram = torch.zeros(count, drafts + 1, dtype=torch.float64)
        row = torch.arange(count)
        prefix = student.prefix(self.tokens[:, : int(self.lengths.max())])
        states = prefix.hidden[row.to(prefix.hidden.device), (self.lengths - 1).to(prefix.hidden.device)]
        self.u = self._numbers(count)  # [S], of the last token
        self.tokens[row, self.lengths] = pick(self._log_probs(states), self.u.to(states.device)).cpu()
        self.lengths += 1

    def step(self, running: Tensor, candidates: int) -> None:
        """One step of the texts in running[R]."""
        count, drafts = len(running), self.drafts
        prefix = self.student.prefix(self.tokens[running, : int(self.lengths[running].max())])
        row = torch.arange(count).repeat_interleave(candidates)  # [R * M]
        u = self._numbers(count, candidates, drafts + 1)  # of x_2..x_(2+K)
        u = torch.cat([self.u[running, None, None].expand(-1, candidates, 1), u], 2).flatten(0, 1)  # [R * M, K + 2]
        start = self.lengths[running][row] - 2  # x_1 is behind it
        parts = []
        for part in chunks(self.student, prefix.hidden.shape[1], drafts + 1, len(row)):
            first = self.tokens[running[row[part]], start[part] + 1]
            parts.append(self._verified(prefix, row[part], start[part], u[part], first))
        picked, accepted, off = (
            torch.cat(values).unflatten(0, (count, candidates)) for values in zip(*parts, strict=True)
        )
        best = choose(off, accepted)  # [R]
        at = torch.arange(count)
        picked, accepted = picked[at, best], accepted[at, best]  # [R, K + 1], [R]
        self.u[running] = u.unflatten(0, (count, candidates))[at, best, accepted + 1]
        columns = self.lengths[running][:, None] + torch.arange(drafts + 1)
        self.tokens[running[:, None], columns] = picked  # what is behind the accepted ones is overwritten or cut
        self.lengths[running] += 1 + accepted
        self.histogram[running, accepted] += 1

    def _verified(
        self, prefix: Prefix, row: Tensor, start: Tensor, u: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of candidates with u[B, K + 2] (of x_1 on): tokens picked [B, K + 1], accepted drafts [B], criterion [B]."""
        student, rows = self.student, draft_rows(self.student, self.drafts)
        hidden = student.aux(prefix, row, start, u[:, : rows.stop])[:, rows]
        drafted = draft(student, hidden, u[:, 1 : self.drafts + 1], False, first).cpu()
        states = student.plain(prefix, row, start, torch.cat([first[:, None], drafted], 1))  # [B, K + 1, D]
        log_q = self._log_probs(states)
        mine = u[:, 1:].to(log_q.device)
        picked = pick(log_q.flatten(0, 1), mine.flatten()).view(mine.shape)
        left, right = edges(log_q, picked)
        off = ((mine.double() - left) / (right - left) - 0.5).abs().sum(1)
        accepted = (picked[:, :-1].cpu() == drafted).long().cumprod(1).sum(1)
        return picked.cpu(), accepted, off.cpu()

    def _log_probs(self, states: Tensor) -> Tensor:
        return self.sampling.log_probs(self.student.logits(states))

    def _numbers(self, *shape: int) -> Tensor:
        return (torch.randint(STEPS, shape, generator=self.generator) / STEPS).float()
