"""Replacement of vLLM's `expand_batch_to_tokens` where its CPU kernel does not write its output.

`utils/cpu_triton_utils.py:_expand_kernel_impl` (vLLM 0.31 to 0.33) converts a float32 or int32 output
to int64 and fills the copy. Temperatures, top-k and top-p of V1 speculative sampling on a CPU are
then whatever the memory held.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """x[batch] repeated to [num_tokens], row i cu_num_tokens[i] - cu_num_tokens[i-1] times; one value replaced."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return x.repeat_interleave(counts, output_size=num_tokens)


def is_broken(original: Callable[..., Tensor]) -> bool:
    """Whether `original` loses float values on the CPU: tried out, once, on three tokens."""
    x, counts = torch.tensor([0.25, 0.75]), torch.tensor([1, 3], dtype=torch.int32)
    try:
        return original(x, counts, 3).tolist() != [0.25, 0.75, 0.75]
    except Exception:  # no CPU kernel at all in a GPU build: nothing to mend
        return False


def choose(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`original` where it works; otherwise a function that uses it for what is not on the CPU.

    The choice is made at the first call: trying the kernel earlier would load it in every process.
    """
    chosen: list[Callable[..., Tensor]] = []

    def expand_batch_to_tokens(
        x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Tensor:
        if x.device.type != "cpu":
            return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        if not chosen:
            chosen.append(expand if is_broken(original) else original)
        return chosen[0](x, cu_num_tokens, num_tokens, replace_from, replace_to)

    return expand_batch_to_tokens
