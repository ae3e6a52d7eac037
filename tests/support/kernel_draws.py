"""Draws through vLLM's own kernels of drafting noise and verification, in a fork of Model Runner V2 (forks.py).

`block_texts`: block verification; the distributions are first-order and of two tokens, chosen so that noise used twice
shifts the third token most. `masked_tokens`: drafts that a grammar forbids, marked as this package does ("kept") and as
vLLM 0.32 does ("cut"); the grammar allows the tokens 0 and 1: the target's P has only these, and Q mostly the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

LENGTH, BATCH = 3, 500
P, Q = (0.5, 0.5, 0.0, 0.0), (0.4, 0.0, 0.3, 0.3)


def draft_and_verify(
    log_p, log_q, last, anchor, seeds, noise, mark=lambda rows: rows, is_block=False
) -> tuple[Tensor, Tensor]:
    """Draft after the tokens last[B] at positions anchor[B]; return verified tokens [B, 1 + K] and their number [B].

    Args:
        log_p: function from tokens [B, 1 + K] to the target's logits [B, 1 + K, V] after them.
        log_q: [V, V], of the next draft given the token before.
        seeds, noise: seeds [B] of verification, and of each of the K drafts.
        mark: function that replaces invalid drafts among tokens [B, 1 + K] by -1.
    """
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    count, drafts = len(last), len(noise)
    slots, temperature, cache = torch.arange(count), torch.ones(count), torch.zeros(count, drafts, log_q.shape[1])
    rows = [last]
    for k in range(drafts):
        options = {"apply_temperature": True, "is_drafting": True, "logits_cache_col": torch.tensor(k)}
        q = log_q[rows[-1]].contiguous()
        rows.append(gumbel_sample(q, slots, temperature, noise[k], anchor + k, logits_cache=cache, **options))
    tokens, columns = torch.stack(rows, dim=1), torch.arange(drafts + 1)
    starts, positions = (torch.arange(count + 1) * (drafts + 1)).int(), (anchor[:, None] + columns).flatten()
    rows = (slots, slots.repeat_interleave(drafts + 1), columns.repeat(count).int())
    logits, options = log_p(tokens).flatten(0, 1).contiguous(), {"use_block_verification": is_block}
    given = (logits, cache, mark(tokens).flatten(), starts, positions, *rows)
    return rejection_sample(*given, temperature, seeds, drafts, None, **options)


def block_distributions() -> tuple[Tensor, Tensor]:
    """p and q of the next token [V, V], given the last."""
    tables = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 1.5
    return tables[0].softmax(-1), tables[1].softmax(-1)


def block_texts(is_fresh: bool, count: int) -> list[list[int]]:
    """At least `count` texts of LENGTH tokens after token 0 at position 1.

    is_fresh: noise as it is where blocks are served; else drafts are keyed by the request's seed and their position.
    """
    from vllm_mtpc.proposers.config.versions import keys_noise_by_draft
    from vllm_mtpc.proposers.v2.verification import step_seeds

    keyed, (log_p, log_q) = keys_noise_by_draft(), (one.float().log() for one in block_distributions())
    made: list[list[int]] = []
    while len(made) < count:
        seeds = torch.randint(1 << 62, (BATCH,), generator=torch.Generator().manual_seed(len(made)))
        texts = [[0] for _ in range(BATCH)]
        while running := [row for row, text in enumerate(texts) if len(text) <= LENGTH]:
            last, anchor = (torch.tensor([of(texts[row]) for row in running]) for of in (lambda text: text[-1], len))
            own = seeds[running]
            drafting = step_seeds(own, anchor) if is_fresh else own
            # the kernel that serves drafts does not mix k in
            noise = [drafting ^ (k << 32) if keyed else drafting for k in range(4)]
            verifying = own if keyed else drafting
            tokens, valid = draft_and_verify(log_p.__getitem__, log_q, last, anchor, verifying, noise, is_block=True)
            for row, new, size in zip(running, tokens.tolist(), valid.tolist(), strict=True):
                texts[row] += new[:size]
        made += [text[1 : 1 + LENGTH] for text in texts]
    return made


def masked_tokens(count: int) -> dict[str, list[int]]:
    """First tokens after token 0 at position 1, by how forbidden drafts are marked."""
    from vllm_mtpc.proposers.v2.verification import unmark_first

    def forbidden(tokens: Tensor) -> Tensor:
        return (tokens >= 2).cumsum(1) > 0

    def log_p(tokens: Tensor) -> Tensor:
        """Rows after the first forbidden draft are not masked: there, any token is as good as another."""
        return torch.where(forbidden(tokens)[:, :, None], torch.zeros(len(P)), torch.tensor(P).log())

    def cut(tokens: Tensor) -> Tensor:
        return tokens.flatten().masked_fill(forbidden(tokens).flatten(), -1)

    def kept(tokens: Tensor) -> Tensor:
        return tokens.flatten().masked_fill(unmark_first(forbidden(tokens).flatten()), -1)

    found = {}
    seeds = torch.randint(1 << 62, (count,), generator=torch.Generator().manual_seed(3))
    last, anchor = torch.zeros(count, dtype=torch.long), torch.ones(count, dtype=torch.long)
    log_q = torch.tensor(Q).log().expand(len(Q), -1)
    for name, mark in (("kept", kept), ("cut", cut)):
        tokens, valid = draft_and_verify(log_p, log_q, last, anchor, seeds, [seeds, seeds], mark)
        for row, length in zip(tokens.tolist(), valid.tolist(), strict=True):
            if max(row[:length]) > 1:  # the row of a draft is the one before it: forbidden drafts are never accepted
                raise AssertionError(f"a forbidden draft came out: {row[:length]}")
        found[name] = tokens[:, 0].tolist()
    return found
