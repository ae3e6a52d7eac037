"""Drafts cases by the kernel; every output has NaN or the largest integers before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.interpreted import launch, moved, poisoned
from vllm_mtpc.kernels.bigram import Bigram
from vllm_mtpc.kernels.filter import Program
from vllm_mtpc.kernels.shard import Shard

POISON = 2**62


@dataclass
class Case:
    """Inputs of a batch and options of the drafter."""

    program: Program
    params: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Bigram | None]  # as `DraftParams`
    slots: Tensor  # [B]
    temperature: Tensor  # [slots]
    seeds: Tensor  # [slots]
    pos: Tensor  # [B]
    one_launch: bool | None = None
    draw: bool = True
    with_cache: bool = True
    cache_dtype: torch.dtype = torch.float32
    use_fp64: bool = False
    shard: Shard | None = None  # params are those of a rank


@dataclass
class Drafts:
    tokens: Tensor  # [B, K]
    confidences: Tensor  # [B, K]
    cache: Tensor | None  # [slots, K, V]
    one_launch: bool


def run(cases: dict[str, Case]) -> dict[str, Drafts]:
    """Return the kernel's drafts of every case, on the CPU."""
    return launch(draft_all, cases)


def draft_all(cases: dict[str, Case], device: str) -> dict[str, Drafts]:
    with poisoned():
        return {name: _draft(case, device) for name, case in cases.items()}


def _draft(case: Case, device: str) -> Drafts:
    from tests.support.draft_noise import noised_argmax
    from vllm_mtpc.kernels.draft.kernel import Drafter

    batch, num_drafts, r, vocab_size = case.params[1].shape
    *params, bigram = case.params
    vocab_size = case.shard.vocab_size if case.shard else vocab_size
    drafter = Drafter(
        case.program,
        r,
        vocab_size,
        torch.device(device),
        noised_argmax,
        case.use_fp64,
        case.one_launch,
        case.shard,
    )
    tokens = torch.full((batch, num_drafts + 2), POISON, device=device)[:, :num_drafts]
    confidences = torch.full((batch, num_drafts + 1), float("nan"), device=device)[:, :num_drafts]
    shape = (len(case.temperature), num_drafts + 1, vocab_size)
    cache = torch.full(shape, float("nan"), dtype=case.cache_dtype, device=device) if case.with_cache else None
    drafter(
        *(moved(part, device) for part in params),
        bigram and Bigram(*(moved(part, device) for part in bigram)),
        slots=case.slots.to(device),
        temperature=case.temperature.to(device),
        seeds=case.seeds.to(device),
        pos=case.pos.to(device),
        tokens=tokens,
        confidences=confidences,
        cache=cache,
        draw=case.draw,
    )
    return Drafts(tokens.cpu(), confidences.cpu(), None if cache is None else cache.cpu(), drafter.one_launch)
