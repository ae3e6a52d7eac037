"""PTP, appendix E: decoding with several candidates of u per step, of which one is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from vllm_mtpc.eval.evaluator import ratio
from vllm_mtpc.eval.ptp_evaluator import windows_at_once
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.heads.ptp.distribution import STEPS, edges
from vllm_mtpc.heads.ptp.student import Prefix, Student
from vllm_mtpc.kernels.pick import pick


def choose(off: Tensor, accepted: Tensor) -> Tensor:
    """Return the candidate [R] to keep by the criterion off[R, M]; depending on accepted[R, M] would bias the text."""
    return off.argmin(1)


class Written:
    """Texts sampled with several candidates per step, of which one is kept.

    A step starts from the text up to x_1 and the u that picked it. Each of M candidates draws u for the next tokens,
    drafts x_2..x_(1+K) from them, and is verified in one pass of the target: t_k = Pick(u_k, Q_k(. | drafts before k)).
    The candidate whose u are nearest to the middle of their intervals is kept,

        argmin_m sum_k |f_k - 1/2|,   f_k = (u_k - F_left) / (F_right - F_left) of t_k

    (the paper's equation 18 has argmax and the ends exchanged). Its accepted drafts and the t_k after them, which is
    the next x_1, become text; every later u is drawn again.

    The distribution of the text is the target's: given all drafts and tokens before k, f_k is uniform and independent
    of t_k. So the f of a candidate are independent of the text it writes, and choosing by any function of the f does
    not change its distribution. A choice that depends on tokens does, and so would the u after the first wrong draft if
    they were kept: their f belong to another text.

    tokens: [S, L] int64, prompts included, -1 after the end; histogram: [S, K + 1] float64, steps by accepted drafts.
    """

    def __init__(
        self,
        student: Student,
        prompts: Sequence[Tensor],
        candidates: int,
        new_tokens: int,
        sampling: Sampling,
        seed: int = 0,
    ) -> None:
        drafts = student.config.num_speculative_tokens
        self.student, self.candidates, self.drafts, self.sampling = student, candidates, drafts, sampling
        self.generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts])  # x_1 included, once it is picked
        self.longest = self.lengths + new_tokens
        self.tokens = torch.zeros(len(prompts), int(self.longest.max()) + drafts + 2, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = prompt
        self.histogram = torch.zeros(len(prompts), drafts + 1, dtype=torch.float64)

    @torch.inference_mode()
    def run(self) -> Written:
        """Write all texts; no token ends one."""
        running = torch.arange(len(self.tokens))
        hidden = self.student.prefix(self.tokens[:, : int(self.lengths.max())]).hidden
        states = hidden[running.to(hidden.device), (self.lengths - 1).to(hidden.device)]
        self.u = self._numbers(len(running))  # [S], of the last token
        self.tokens[running, self.lengths] = pick(self._log_probs(states), self.u.to(states.device)).cpu()
        self.lengths += 1
        label = f"T={self.sampling.temperature:g} M={self.candidates}"
        with tqdm(total=len(running), desc=label, unit="text", disable=None) as bar:
            while len(running):
                self._step(running)
                running = running[self.lengths[running] < self.longest[running]]
                bar.update(len(self.tokens) - len(running) - bar.n)
        self.tokens[torch.arange(self.tokens.shape[1]) >= self.longest[:, None]] = -1
        return self

    def tokens_per_step(self) -> tuple[float, float]:
        """Return tokens/step over all texts and its standard error."""
        steps, drafts = self.histogram.sum(1), torch.arange(self.drafts + 1, dtype=torch.float64)
        return ratio(steps + self.histogram @ drafts, steps)

    def _step(self, running: Tensor) -> None:
        """Carry out one step of the texts in running[R]."""
        count, candidates, drafts = len(running), self.candidates, self.drafts
        prefix = self.student.prefix(self.tokens[running, : int(self.lengths[running].max())])
        row = torch.arange(count).repeat_interleave(candidates)  # [R * M]
        u = self._numbers(count, candidates, drafts + 1)  # of x_2..x_(2+K)
        u = torch.cat([self.u[running, None, None].expand(-1, candidates, 1), u], 2).flatten(0, 1)  # [R * M, K + 2]
        start = self.lengths[running][row] - 2  # x_1 follows
        parts = []
        size = windows_at_once(self.student, prefix.hidden.shape[1], drafts + 1)
        for part in torch.arange(len(row)).split(size):
            first = self.tokens[running[row[part]], start[part] + 1]
            parts.append(self._verified(prefix, row[part], start[part], u[part], first))
        tokens, accepted, off = (torch.cat(values).unflatten(0, (count, -1)) for values in zip(*parts, strict=True))
        at, best = torch.arange(count), choose(off, accepted)  # [R]
        accepted = accepted[at, best]
        self.u[running] = u.unflatten(0, (count, candidates))[at, best, accepted + 1]
        columns = self.lengths[running][:, None] + torch.arange(drafts + 1)
        # Tokens after the accepted drafts are overwritten or dropped.
        self.tokens[running[:, None], columns] = tokens[at, best]
        self.lengths[running] += 1 + accepted
        self.histogram[running, accepted] += 1

    def _verified(
        self, prefix: Prefix, row: Tensor, start: Tensor, u: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return picked tokens [B, K + 1], accepted drafts [B] and criterion [B] of candidates with u[B, K + 2]."""
        student = self.student
        drafted = student.draft(prefix, row, start, u[:, : self.drafts + 1], first).cpu()
        states = student.plain(prefix, row, start, torch.cat([first[:, None], drafted], 1))  # [B, K + 1, D]
        log_q = self._log_probs(states)
        mine = u[:, 1:].to(log_q.device)
        tokens = pick(log_q.flatten(0, 1), mine.flatten()).view(mine.shape)
        left, right = edges(log_q, tokens)
        off = ((mine.double() - left) / (right - left) - 0.5).abs().sum(1)
        accepted = (tokens[:, :-1].cpu() == drafted).long().cumprod(1).sum(1)
        return tokens.cpu(), accepted, off.cpu()

    def _log_probs(self, states: Tensor) -> Tensor:
        return self.sampling.log_probs(self.student.logits(states))

    def _numbers(self, *shape: int) -> Tensor:
        return (torch.randint(STEPS, shape, generator=self.generator) / STEPS).float()
