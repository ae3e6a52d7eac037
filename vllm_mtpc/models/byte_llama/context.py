"""The last L token ids before every row of a step, committed and drafted ones alike.

Ids lie in a paged cache of their own beside the keys and values: what a row reads was written by the step that
computed it, a rejected draft's id is overwritten by the step that computes the right one, and a block that is found
in the prefix cache holds the ids of its tokens. Neither model runner has to know, and every attention backend will do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from vllm_mtpc.models.byte_llama.suffixes import ABSENT
from vllm_mtpc.models.paged_cache import PagedCache, PlanBackend, PlanBuilder


class Lookback(NamedTuple):
    """Where a step's ids go and where their contexts lie; rows of padding use block 0, which no request has."""

    block: Tensor  # [T]
    offset: Tensor  # [T]
    position: Tensor  # [T]
    block_table: Tensor  # [T, M] int32, of each row's request


class LookbackBuilder(PlanBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Lookback:
        common = common_attn_metadata
        slots = common.slot_mapping[: common.num_actual_tokens].clamp(min=0)
        ends = common.query_start_loc[1:].contiguous()
        row = torch.arange(len(slots), dtype=ends.dtype, device=slots.device)
        request = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
        position = (common.seq_lens[request] - ends[request] + row).clamp(min=0)
        block_size = self.kv_cache_spec.block_size
        return Lookback(slots // block_size, slots % block_size, position, common.block_table_tensor[request])


class LookbackBackend(PlanBackend):
    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return LookbackBuilder


class TokenCache(PagedCache):
    """Token ids by slot, [blocks, 1, N, 2] int32; the second number is unused (a page has keys and values)."""

    backend = LookbackBackend

    def __init__(self, prefix: str, max_length: int) -> None:
        super().__init__(prefix, num_heads=1, head_size=1, dtype=torch.int32)
        self.register_buffer("back", torch.arange(max_length), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor | None:
        """The last L ids [T, L] int64 up to each row's own, ABSENT before a text; None where vLLM has no caches yet."""
        plans = get_forward_context().attn_metadata
        if plans is None:
            return None
        plan: Lookback = plans[self.layer_name]
        ids = self.kv_cache[:, 0, :, 0]  # [blocks, N]
        ids[plan.block, plan.offset] = input_ids[: len(plan.block)].to(ids.dtype)
        position = plan.position[:, None] - self.back  # [T, L]
        at = position.clamp(min=0)
        block = plan.block_table.gather(1, at // ids.shape[1])
        found = ids[block.long(), at % ids.shape[1]].long()
        return torch.where(position >= 0, found, ABSENT)
