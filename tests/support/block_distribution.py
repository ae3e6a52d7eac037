"""Draws through vLLM's own kernels of drafting noise and block verification.

They run in a fork of Model Runner V2's server (forks.py). The distributions are first-order and of two tokens, chosen
so
that noise used twice shifts the third token most.
"""

from __future__ import annotations

import torch
from torch import Tensor

VOCAB, DRAFTS, LENGTH, BATCH = 2, 4, 3, 500


def distributions() -> tuple[Tensor, Tensor]:
    """p and q of the next token [V, V], given the last."""
    tables = torch.randn(2, VOCAB, VOCAB, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 1.5
    return tables[0].softmax(-1), tables[1].softmax(-1)


def step(last: Tensor, anchor: Tensor, seeds: Tensor, is_fresh: bool) -> tuple[Tensor, Tensor]:
    """Tokens [B, K + 1] and how many are valid [B], after the tokens last [B] at positions anchor [B].

    is_fresh: noise as it is where blocks are served; else drafts are keyed by the request's seed and their position.
    """
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    from vllm_mtpc.proposers.config.versions import keys_noise_by_draft
    from vllm_mtpc.proposers.v2.verification import step_seeds

    drafting, keyed = step_seeds(seeds, anchor) if is_fresh else seeds, keys_noise_by_draft()
    log_p, log_q = (distribution.float().log() for distribution in distributions())
    count = len(last)
    slots, temperature = torch.arange(count), torch.ones(count)
    cache, given = torch.zeros(count, DRAFTS, VOCAB), [last]
    for k in range(DRAFTS):
        draft = gumbel_sample(
            log_q[given[-1]],
            slots,
            temperature,
            drafting ^ (k << 32) if keyed else drafting,  # the kernel that serves drafts does not mix k in
            anchor + k,
            apply_temperature=True,
            is_drafting=True,
            logits_cache=cache,
            logits_cache_col=torch.tensor(k),
        )
        given.append(draft)
    rows = torch.stack(given, dim=1).flatten()  # [B * (K + 1)] token of each row
    columns = torch.arange(DRAFTS + 1)
    return rejection_sample(
        log_p[rows],
        cache,
        rows,
        (torch.arange(count + 1) * (DRAFTS + 1)).int(),
        (anchor[:, None] + columns).flatten(),
        slots,
        slots.repeat_interleave(DRAFTS + 1),
        columns.repeat(count).int(),
        temperature,
        seeds if keyed else drafting,
        DRAFTS,
        None,
        use_block_verification=True,
    )


def decode(is_fresh: bool, seed: int) -> list[list[int]]:
    """LENGTH tokens of BATCH requests after token 0 at position 1."""
    seeds = torch.randint(1 << 62, (BATCH,), generator=torch.Generator().manual_seed(seed))
    texts = [[0] for _ in range(BATCH)]
    while running := [row for row, text in enumerate(texts) if len(text) <= LENGTH]:
        last, anchor = (torch.tensor([of(texts[row]) for row in running]) for of in (lambda text: text[-1], len))
        tokens, valid = step(last, anchor, seeds[running], is_fresh)
        for row, new, count in zip(running, tokens.tolist(), valid.tolist(), strict=True):
            texts[row] += new[:count]
    return [text[1 : 1 + LENGTH] for text in texts]


def draws(is_fresh: bool, count: int) -> list[list[int]]:
    """At least `count` texts of LENGTH tokens."""
    made: list[list[int]] = []
    while len(made) < count:
        made += decode(is_fresh, len(made))
    return made
