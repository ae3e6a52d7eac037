"""Students of tiny targets, with random adapters or picking as the target; texts and counters of a server."""

from __future__ import annotations

import torch

from tests.support.tiny import Decoded, llama_target
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.eval.evaluator import request_u
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.heads.ptp.student import Prefix, Student
from vllm_mtpc.hf import Target
from vllm_mtpc.kernels.pick import pick

VARIANTS = ("o-ptp", "c-ptp")
ONE_HOT = 64  # what o-ptp's oracle hands out in the place of a hidden state, wider than one


def random_student(target: Target, variant: str = "o-ptp", window: int = 5, seed: int = 0, **more: object) -> Student:
    """Its adapters change what the rows give, and read u."""
    torch.manual_seed(seed)
    options = {"variant": variant, "window": window, "verifier": "t", "lora_rank": 4, **more}
    config = PtpConfig.create(target=target.config, **options)
    student = Student(target, config).eval().requires_grad_(False)
    for name, value in student.lora().items():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.3)
    return student


class Oracle(Student):
    """Token by token, what the rows stand for: picks by their u from the target's distribution at temperature 1."""

    def prefix(self, tokens: torch.Tensor, documents: torch.Tensor | None = None) -> Prefix:
        self.read = tokens
        return super().prefix(tokens, documents)

    def aux(self, prefix: Prefix, row: torch.Tensor, start: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """The state that follows the picked tokens (c-ptp), or one whose logits have the picked token (o-ptp)."""
        found = []
        for r, s, numbers in zip(row.tolist(), start.tolist(), u, strict=True):
            text, states = self.read[r, : s + 1].tolist(), []
            for number in numbers:
                distribution = self.target.logits(self.target.hidden(torch.tensor([text]))[:, -1])
                text.append(int(pick(distribution, number[None])))
                state = self.target.hidden(torch.tensor([text]))[0, -1]
                states.append(
                    torch.nn.functional.one_hot(torch.tensor(text[-1]), 64).float() if self.first_row else state
                )
            found.append(torch.stack(states))
        return torch.stack(found)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        vocab_size = self.target.vocab_size
        return hidden[..., :vocab_size] if hidden.shape[-1] == ONE_HOT else self.target.logits(hidden)


def oracle(variant: str, vocab_size: int = 6, window: int = 4) -> Oracle:
    target = llama_target(vocab_size)
    config = PtpConfig.create(variant=variant, window=window, target=target.config, verifier="t", lora_rank=1)
    return Oracle(target, config).eval().requires_grad_(False)


def continue_prompt(
    student: Student, prompt: torch.Tensor, new_tokens: int, sampling: Sampling, seed: int, drafts: int | None = None
) -> Decoded:
    """Write the text of a seed token by token, then draft along it as a two-pass server does."""
    target, text, drafts = student.target, prompt.tolist(), drafts or student.config.num_speculative_tokens
    u = request_u(sampling, [seed], len(text) + new_tokens + drafts + 1, target.device)
    for k in range(len(text), u.shape[1]):  # u_k is a hash of (seed, k - 1)
        log_q = sampling.log_probs(target.logits(target.hidden(torch.tensor([text]))[:, -1]))
        text.append(int(log_q.argmax(-1) if sampling.greedy else pick(log_q, u[:, k])))
    tokens, at, accepted = torch.tensor(text), len(prompt), []  # x_1 of the first step
    while at + 1 - len(prompt) < new_tokens:
        first, prefix = torch.zeros(1, dtype=torch.long), student.prefix(tokens[None, : at + 1])
        place, sure = (prefix, first, first + at), tokens[at + 1 : at + 2]  # x_2 is the target's own
        found = student.draft(*place, u[:, at + 1 : at + 1 + drafts], sure, sampling.greedy)[0]
        accepted.append(1 + int((found == tokens[at + 2 : at + 1 + drafts]).long().cumprod(0).sum()))
        at += 1 + accepted[-1]
    return Decoded(text[len(prompt) :][:new_tokens], accepted)
