"""Drafts cases by the kernel: natively on a GPU, else interpreted in one forked process.

Whatever the launcher leaves uninitialised, and every output, holds NaN or the largest integers before.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.support import forks
from tests.support.interpreted import moved
from vllm_mtpc.kernels.bigram import Bigram
from vllm_mtpc.kernels.filter import Program
from vllm_mtpc.kernels.shard import Shard

ROOT = Path(__file__).parents[2]
ON_GPU = torch.cuda.is_available()
POISON = 2**62


@dataclass
class Case:
    """What a batch is drafted from, and the sizes of what is handed to the kernel next to it."""

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
    """What the kernel makes of every case, on the CPU."""
    if ON_GPU:
        return _draft_all(cases, "cuda")
    return forks.call("v2", "tests.support.draft_runner:_interpret", cases, timeout=600)


def _interpret(cases: dict[str, Case]) -> dict[str, Drafts]:
    warnings.simplefilter("ignore")  # the interpreter computes lanes that are masked out, -inf - -inf among them
    return _draft_all(cases, "cpu")


def _draft_all(cases: dict[str, Case], device: str) -> dict[str, Drafts]:
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    try:
        return {name: _draft(case, device) for name, case in cases.items()}
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


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
