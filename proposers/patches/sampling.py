"""A bug of V1 sampling on a CPU, mended for every engine: the one replacement that runs where no head is served.

`utils/cpu_triton_utils.py:_expand_kernel_impl` (vLLM 0.31 to 0.33) converts a float32 or int32 output to int64 and
fills the copy. Temperatures, top-k and top-p of V1 speculative sampling on a CPU are then whatever the memory held.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm_mtpc.proposers.patches.patch import patch

if TYPE_CHECKING:
    from torch import Tensor


@patch(
    "vllm.v1.sample.rejection_sampler",
    "expand_batch_to_tokens",
    needs=("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    why="vLLM's CPU kernel fills a copy of a float output, so V1 samples with uninitialised temperatures",
)
def expand_batch_to_tokens(original: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if x.is_cpu and is_broken(original):
        return expand(x, *args, **kwargs)
    return original(x, *args, **kwargs)


def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """x[batch] repeated to [num_tokens], row i cu_num_tokens[i] - cu_num_tokens[i-1] times; one value replaced."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    if replace_from != replace_to:
        x = x.masked_fill(x == replace_from, replace_to)
    return x.repeat_interleave(counts, output_size=num_tokens)


@cache
def is_broken(original: Callable[..., Tensor]) -> bool:
    """Whether `original` loses float values on the CPU: tried out on three tokens, at the first call and not earlier,
    because that loads the kernel."""
    import torch

    x, counts = torch.tensor([0.25, 0.75]), torch.tensor([1, 3], dtype=torch.int32)
    try:
        return original(x, counts, 3).tolist() != [0.25, 0.75, 0.75]
    except Exception:  # no CPU kernel at all in a GPU build: nothing to mend
        return False
