"""Which tokens EvaByte keeps: those of the window that is being written; older windows are read as summaries only.

Tokens and summaries are then two KV cache groups with block tables of their own, in one pool of equal pages. With
blocks of B tokens (vLLM's block size) and chunks of C, a block of summaries covers B tokens and one of tokens B / C:

    summaries   FullAttentionSpec, B tokens in B / C states: kept for the whole text
    tokens      WindowSpec, B / C tokens: freed as soon as their window is over

vLLM frees by tokens that are verified (`processed_computed_tokens`), never by drafts. The next step starts at the first
position that is not verified, so a draft that crossed a boundary and was rejected still finds its window, and the
chunk that the step completes lies in a window that is not over.

Prefix caching: a hit of L tokens needs all summaries before L, and the tokens of L's own window before L. vLLM's
manager of chunked attention looks up the latter, but not where groups have different block sizes; the lengths of hits
are multiples of B, which divides the window, so cutting a hit to such a multiple never moves it into a window whose
tokens were not looked up.
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
    """Allocates and frees one request's tokens, window by window."""

    @classmethod
    def find_longest_cache_hit(
        cls, *, kv_cache_spec: Any, alignment_tokens: int, **others: Any
    ) -> tuple[tuple[list[Any], ...], int]:
        """Blocks of the longest hit whose length is a multiple of `alignment_tokens`, by group, and that length."""
        block = kv_cache_spec.block_size
        found, length = super().find_longest_cache_hit(kv_cache_spec=kv_cache_spec, alignment_tokens=block, **others)
        length -= length % alignment_tokens
        return tuple(blocks[: length // block] for blocks in found), length


@register_kv_cache_spec(manager_class=WindowManager)
@dataclass(frozen=True, kw_only=True)
class WindowSpec(ChunkedLocalAttentionSpec):
    """Tokens of windows of `attention_chunk_size`."""


def frees_windows(vllm_config: VllmConfig, window_size: int) -> bool:
    """Whether tokens of past windows are freed: unless something asks for one KV cache group, or blocks do not fit."""
    spec, block = vllm_config.speculative_config, vllm_config.cache_config.block_size
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager or vllm_config.kv_transfer_config is not None:
        return False
    if spec is not None and spec.use_eagle():  # would drop the last block of a hit, which vLLM cannot do in windows
        return False
    if window_size % block:
        logger.info_once(
            "EvaByte keeps the tokens of all windows: blocks of %d tokens do not divide its window of %d.",
            block,
            window_size,
        )
        return False
    return True
