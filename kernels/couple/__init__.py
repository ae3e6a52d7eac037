"""How many drafts are kept that must equal the tokens picked by the verifier; see README.md here."""

from __future__ import annotations

from torch import Tensor

from vllm_mtpc.kernels.couple import naive
from vllm_mtpc.kernels.couple.naive import Others


def accept(
    tokens: Tensor, drafts: Tensor, cu_num_logits: Tensor, width: int, others: Others | None = None
) -> tuple[Tensor, Tensor]:
    """Kept tokens [R, width] int64 and their number [R] int32, as `naive.py` says; the Triton kernel on a GPU."""
    if not tokens.is_cuda:
        return naive.accept(tokens, drafts, cu_num_logits, width, others)
    from vllm_mtpc.kernels.couple import kernel  # importing it imports triton

    return kernel.accept(tokens, drafts, cu_num_logits, width, others)
