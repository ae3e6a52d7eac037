"""The draft kernel as Model Runner V2 calls it, with buffers of its own, to be timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vllm_mtpc.kernels.filter.program import Program


def kernel(
    program: Program, shape: tuple[int, int, int, int], temperature: float, device: torch.device
) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """A call that drafts from `DraftParams` whose leaf has the shape [B, K, r, V]; a GPU's, or an interpreter's."""
    import torch

    from vllm_mtpc.engine.noise import gumbel_noised_argmax
    from vllm_mtpc.kernels.draft.kernel import Drafter

    batch, drafts, r, vocab_size = shape
    drafter = Drafter(program, r, vocab_size, device, gumbel_noised_argmax)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    given = {
        "slots": slots,
        "temperature": torch.full((batch,), temperature, device=device),
        "seeds": slots.long(),
        "pos": slots.long(),
        "tokens": torch.zeros(batch, drafts, dtype=torch.int64, device=device),
        "confidences": torch.zeros(batch, drafts, device=device),
        "cache": torch.zeros(batch, drafts, vocab_size, device=device),
    }

    def draft(params: tuple[Tensor, ...]) -> Tensor:
        drafter(*params, **given)
        return given["tokens"]

    return draft
