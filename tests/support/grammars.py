"""A grammar that counts; and next tokens through vLLM's own kernels under a grammar.

The latter run in a fork of Model Runner V2's server (forks.py). Every request has two drafts of distribution q; the
grammar
allows the tokens 0 and 1, so the target's distribution p has only these, and q mostly the others. Forbidden drafts are
marked as this package does ("kept") and as vLLM 0.32 does ("cut").
"""

from __future__ import annotations

import torch
from torch import Tensor

VOCAB = 40
P, Q = (0.5, 0.5, 0.0, 0.0), (0.4, 0.0, 0.3, 0.3)
DRAFTS = 2


class Counting:
    """A grammar whose k-th token must be at least k, and which ends with the token 9."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if token < len(self.read) and not self.is_terminated():
                return False
            self.read.append(token)
        return True

    def is_terminated(self) -> bool:
        return 9 in self.read

    def rollback(self, count: int) -> None:
        del self.read[len(self.read) - count :]

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        allowed = [token for token in range(VOCAB) if token >= len(self.read)]
        words = [sum(1 << token % 32 for token in allowed if token // 32 == word) for word in range(2)]
        bitmask[row] = torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32)


def first_tokens(count: int, is_kept: bool) -> Tensor:
    """Tokens [count] that follow token 0 at position 1."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    from vllm_mtpc.proposers.v2.verification import unmark_first

    seeds = torch.randint(1 << 62, (count,), generator=torch.Generator().manual_seed(3))
    slots, temperature, anchor = torch.arange(count), torch.ones(count), torch.ones(count, dtype=torch.long)
    cache = torch.zeros(count, DRAFTS, len(P))
    columns = [torch.zeros(count, dtype=torch.long)]
    for k in range(DRAFTS):
        draft = gumbel_sample(
            torch.tensor(Q).log().expand(count, -1).contiguous(),
            slots,
            temperature,
            seeds,
            anchor + k,
            apply_temperature=True,
            is_drafting=True,
            logits_cache=cache,
            logits_cache_col=torch.tensor(k),
        )
        columns.append(draft)
    rows = torch.stack(columns, dim=1)  # [count, 1 + K] token of each row
    # the rows after the first forbidden draft are not masked: there, any token is as good as another
    is_later = ((rows >= 2).cumsum(1) > 0)[:, :, None]
    logits = torch.where(is_later, torch.zeros(len(P)), torch.tensor(P).log())
    invalid = ((rows >= 2).cumsum(1) > 0).flatten()
    rows = rows.flatten().masked_fill(unmark_first(invalid) if is_kept else invalid, -1)
    steps = torch.arange(DRAFTS + 1)
    tokens, valid = rejection_sample(
        logits.flatten(0, 1).contiguous(),
        cache,
        rows,
        (torch.arange(count + 1) * (DRAFTS + 1)).int(),
        (anchor[:, None] + steps).flatten(),
        slots,
        slots.repeat_interleave(DRAFTS + 1),
        steps.repeat(count).int(),
        temperature,
        seeds,
        DRAFTS,
        None,
    )
    # the row of a draft is the one before it: forbidden drafts are never accepted
    for row, length in zip(tokens.tolist(), valid.tolist(), strict=True):
        if not all(token < 2 for token in row[:length]):
            raise AssertionError(f"a forbidden draft came out: {row[:length]}")
    return tokens[:, 0]


def draws(count: int) -> dict[str, list[int]]:
    """The first tokens that come out when forbidden drafts are marked as this package does and as vLLM 0.32 does."""
    return {name: first_tokens(count, name == "kept").tolist() for name in ("kept", "cut")}
