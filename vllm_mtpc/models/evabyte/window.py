"""Freeing of EvaByte's tokens: only those of the current window are kept; older windows are read as summaries.

Tokens and summaries are two KV cache groups with their own block tables, in one pool of equal pages. With blocks of B
tokens (vLLM's block size) and chunks of C, a block of summaries covers B tokens and a block of tokens B / C:

    summaries   FullAttentionSpec, B tokens in B / C states: kept for the whole text
    tokens      WindowSpec, B / C tokens: freed when their window is finished

vLLM frees by verified tokens, never by drafts, so the window of a rejected draft still exists.

Prefix caching: a hit of L tokens needs all summaries before L, and the tokens of L's own window before L. vLLM's
manager of chunked attention looks up the latter, but not for groups of different block sizes. B divides the window, so
truncating a hit to a multiple of B keeps it in a window whose tokens were looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)
KVCacheSpecRegistry._ensure_registered()  # vLLM registers its own only where nothing is registered yet


class WindowManager(ChunkedLocalAttentionManager):
    @classmethod
    def find_longest_cache_hit(
        cls, *, kv_cache_spec: Any, alignment_tokens: int, **others: Any
    ) -> tuple[tuple[list[Any], ...], int]:
        """Return the blocks, by group, of the longest hit of a multiple of `alignment_tokens`, and its length."""
        block = kv_cache_spec.block_size
        found, length = super().find_longest_cache_hit(kv_cache_spec=kv_cache_spec, alignment_tokens=block, **others)
        length -= length % alignment_tokens
        return tuple(blocks[: length // block] for blocks in found), length


@register_kv_cache_spec(manager_class=WindowManager)
@dataclass(frozen=True, kw_only=True)
class WindowSpec(ChunkedLocalAttentionSpec):
    """Tokens of windows of `attention_chunk_size`."""


def frees_windows(vllm_config: VllmConfig, window_size: int) -> bool:
    """Whether tokens of past windows are freed: not if one KV cache group is required, or blocks do not fit."""
    spec, block = vllm_config.speculative_config, vllm_config.cache_config.block_size
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager or vllm_config.kv_transfer_config is not None:
        return False
    if spec is not None and spec.use_eagle():  # would drop the last block of a hit, which vLLM cannot do in windows
        return False
    if window_size % block:
        text = "EvaByte keeps the tokens of all windows: blocks of %d tokens do not divide its window of %d."
        logger.info_once(text, block, window_size)
        return False
    return True
