"""Attention of a target over packed rows: several documents in a row, each attending only to itself.

`torch`: transformers builds a block-diagonal causal mask from position ids that restart, for PyTorch's scaled
dot-product attention. `xformers`: each block is computed without a mask of S x S. Results are equal up to rounding.
"""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm_mtpc.errors import UsageError, install
from vllm_mtpc.heads.trunk.base import document_positions

if TYPE_CHECKING:
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

IMPLEMENTATIONS = {"torch": "sdpa", "xformers": "mtpc_xformers"}  # transformers' names (`attn_implementation`)


def choose_attention(name: str, device: torch.device | str) -> str:
    """Return "torch" or "xformers" for a device; `auto`: xformers if it can run. UsageError: "xformers" cannot run."""
    obstacle = None if name == "torch" else _obstacle(torch.device(device))
    if name == "xformers" and obstacle:
        raise UsageError(f"attention 'xformers' cannot be used: {obstacle}")
    if name == "torch" or obstacle:
        return "torch"
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATIONS["xformers"], xformers_attention)
    AttentionMaskInterface.register(IMPLEMENTATIONS["xformers"], deferred_mask)
    return "xformers"


def packed_arguments(documents: Tensor, attention: str) -> dict[str, Any]:
    """Return keyword arguments of a transformers backbone that keep the documents of packed rows apart.

    Needs `use_cache=False` and no attention mask. Tokens of a document [B, S] are contiguous; -1: padding at the end,
    treated as one more document. `attention` as `choose_attention` returns it.
    """
    arguments: dict[str, Any] = {"position_ids": (positions := document_positions(documents))}
    if attention == "xformers":
        starts = (positions == 0).flatten().nonzero()[:, 0].tolist()
        lengths = [end - start for start, end in itertools.pairwise([*starts, documents.numel()])]
        arguments["packing"] = document_masks(lengths, documents.device)
    return arguments


@torch.no_grad()
def check_packing(backbone: nn.Module, attention: str, device: torch.device | str = "cpu") -> None:
    """Run two short documents in a row; raise UsageError if the second one attends to the first.

    Attention layers of transformers keep packed documents apart; recurrent layers and some models do not.
    """
    documents = torch.tensor([[0] * 4 + [1] * 4], device=device)
    tokens = torch.tensor([[0, 1, 0, 1, 0, 1, 1, 0], [1, 0, 1, 1, 0, 1, 1, 0]], device=device)
    packed = packed_arguments(documents, attention)
    read, again = (backbone(input_ids=row[None], use_cache=False, **packed).last_hidden_state[0, 4:] for row in tokens)
    # Rounding may differ where work is grouped by token (experts); a leak of four tokens is far larger.
    allowed = max(1e-3, 8 * torch.finfo(read.dtype).eps)
    if (read - again).float().norm() > allowed * read.float().norm():
        raise UsageError(
            f"{type(backbone).__name__} does not keep the documents of a packed row apart (recurrent layers, or a "
            "custom mask); type --states vllm, or name another target"
        )


def document_masks(lengths: list[int], device: torch.device) -> Callable[[int | None], BlockDiagonalCausalMask]:
    """Return xformers' mask by sliding window for documents of these lengths in the flattened rows, built once each.

    Token i of a document reads its tokens j <= i; with a sliding window only those with j > i - window.
    """

    @cache
    def mask_of(sliding_window: int | None) -> BlockDiagonalCausalMask:
        from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

        mask = BlockDiagonalCausalMask.from_seqlens(lengths, device=device)
        is_local = sliding_window is not None and sliding_window < max(lengths)
        return mask.make_local_attention(sliding_window) if is_local else mask

    return mask_of


def deferred_mask(**arguments: Any) -> Callable[[], Tensor | None]:
    """Return the dense mask of transformers, built by its first call: a packed forward pass does not use it."""
    from transformers.masking_utils import sdpa_mask

    return cache(lambda: sdpa_mask(**arguments))


def xformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Callable[[], Tensor | None] | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Callable[[int | None], BlockDiagonalCausalMask] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers. query: [B, H, S, D]; key, value: [B, G, S, D]. Returns [B, S, H, D].

    PyTorch's attention is used without packing (generation with a cache, padded batches), with attention sinks or a
    soft cap, and where xformers has no kernel for the dtype or size.
    """
    if packing is not None and kwargs.get("s_aux") is None and kwargs.get("softcap") is None:
        try:
            return _packed(query, key, value, scaling, dropout, packing(kwargs.get("sliding_window"))), None
        except NotImplementedError:  # raised by xformers where no kernel fits
            warnings.warn(f"xformers has no kernel for {query.dtype} here; PyTorch's attention is used", stacklevel=2)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    dense = attention_mask() if callable(attention_mask) else attention_mask
    return sdpa_attention_forward(module, query, key, value, dense, dropout=dropout, scaling=scaling, **kwargs)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, mask: BlockDiagonalCausalMask
) -> Tensor:
    from xformers.ops import memory_efficient_attention

    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    q, k, v = (x.transpose(1, 2).flatten(0, 1)[None] for x in (query, key, value))  # [1, B*S, heads, D]
    if groups != heads:  # xformers' form of grouped queries; its kernels read an expanded head in place
        q = q.unflatten(2, (groups, heads // groups))
        k, v = (x[:, :, :, None].expand(-1, -1, -1, heads // groups, -1) for x in (k, v))
    out = memory_efficient_attention(q, k, v, attn_bias=mask, p=dropout, scale=scaling)
    return out.reshape(batch, length, heads, value.shape[-1])


def _obstacle(device: torch.device) -> str | None:
    """Return the reason why xformers cannot run on a device, and what to type; None if it can."""
    if importlib.util.find_spec("xformers") is None:
        return f"it is not installed; type: {install('train-cuda')}, or --attention torch"
    if device.type != "cuda":
        return f"the device is {device}, and it runs on CUDA only; type --attention torch"
    try:
        tiny = torch.zeros(1, 2, 8, 16, device=device, dtype=torch.float16)  # [B, H, S, D]
        _packed(tiny, tiny, tiny, None, 0.0, document_masks([3, 5], device)(None))
    except Exception as error:  # a build for another torch or CUDA raises many types
        return f"it fails on {device} ({next(iter(str(error).splitlines()), '')}); type --attention torch"
    return None
