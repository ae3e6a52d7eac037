"""What the tests of freed windows note, and break, inside an engine's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support import engine


def _poisoned() -> Callable[[], None]:
    """Fills blocks with NaN when they are handed out, and when they are freed without prefix caching; notes how many
    are in use. A request that reads what it has not written, or has lost, says something else from there on.
    """
    from vllm.v1.core.block_pool import BlockPool

    from vllm_mtpc.models.paged_cache import PagedCache

    caches: list[torch.Tensor] = []
    new, free, bind = BlockPool.get_new_blocks, BlockPool.free_blocks, PagedCache.bind_kv_cache

    def poison(blocks: list[Any]) -> None:
        for cache in caches:
            cache[[block.block_id for block in blocks]] = torch.nan

    def get_new_blocks(self: Any, *args: Any, **kwargs: Any) -> list[Any]:
        blocks = new(self, *args, **kwargs)
        poison(blocks)
        engine.RECORDED.append(self.num_gpu_blocks - 1 - self.get_num_free_blocks())  # block 0 is nobody's
        return blocks

    def free_blocks(self: Any, blocks: Any, *args: Any, **kwargs: Any) -> None:
        blocks = list(blocks)
        free(self, blocks, *args, **kwargs)
        if not self.enable_caching:
            poison([block for block in blocks if block.ref_cnt == 0 and not block.is_null])

    def bind_kv_cache(self: Any, kv_cache: torch.Tensor) -> None:
        bind(self, kv_cache)
        caches.append(kv_cache)

    def undo() -> None:
        BlockPool.get_new_blocks, BlockPool.free_blocks, PagedCache.bind_kv_cache = new, free, bind

    BlockPool.get_new_blocks, BlockPool.free_blocks, PagedCache.bind_kv_cache = (
        get_new_blocks,
        free_blocks,
        bind_kv_cache,
    )
    return undo


def _freed_early() -> Callable[[], None]:
    """The fault: frees by what is drafted, four tokens, not by what is verified."""
    from vllm_mtpc.models.evabyte.window import WindowManager

    undo, original = _poisoned(), WindowManager.get_num_skipped_tokens

    def get_num_skipped_tokens(self: Any, num_computed_tokens: int) -> int:
        return original(self, num_computed_tokens + 4)

    def undo_both() -> None:
        undo()
        WindowManager.get_num_skipped_tokens = original

    WindowManager.get_num_skipped_tokens = get_num_skipped_tokens
    return undo_both


INJECTED = {"poisoned": _poisoned, "freed_early": _freed_early}
