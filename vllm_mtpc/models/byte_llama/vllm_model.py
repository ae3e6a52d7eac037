"""A byte-level Llama for vLLM: Llama, but the embedding of a token is

    x_t = E[id_t] + X[e_t],   e_t: the longest subword whose tokens are the last ones up to t (at most L of them)

Weights have the names of the published checkpoint (`model.expand_embed_tokens.weight` is X).

Token ids are kept in a paged cache next to the keys and values. A step writes the ids of its rows and reads the last L
ids of each row; the next step overwrites the id of a rejected draft.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata, subclass_attention_backend

from vllm_mtpc.models.byte_llama.config import ABSENT, TABLE, build_suffixes
from vllm_mtpc.models.paged_cache import PagedCache, PlanBackend


class Lookback(NamedTuple):
    """Cache slots of a step's T rows and of their contexts; padding uses block 0, which no request has."""

    block: Tensor  # [T]
    offset: Tensor  # [T]
    position: Tensor  # [T]
    block_table: Tensor  # [T, M], int32, of each row's request


class LookbackBuilder(AttentionMetadataBuilder[Lookback]):
    """Builds the plan without state or fixed addresses, so there are no full CUDA graphs."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

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


class TokenCache(PagedCache):
    """Token ids by slot, [blocks, 1, N, 2], int32; the second number is unused: a page has keys and values."""

    backend = subclass_attention_backend("Lookback", PlanBackend, LookbackBuilder)

    def __init__(self, prefix: str, max_length: int) -> None:
        super().__init__(prefix, num_heads=1, head_size=1, dtype=torch.int32)
        self.register_buffer("back", torch.arange(max_length), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor | None:
        """Store the ids [T] of a step; return the last L ids [T, L], or ABSENT; None before there are caches."""
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


class ByteLlamaForCausalLM(LlamaForCausalLM):
    """Llama with another input embedding, which is computed outside of the compiled model."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config, model = self.config, vllm_config.model_config
        values = get_hf_file_to_dict("config.json", model.model, model.revision) or {}
        self.model.expand_embed_tokens = VocabParallelEmbedding(config.expand_input_ids_vocab_size, config.hidden_size)
        self.suffixes = build_suffixes(values.get(TABLE), config)
        # vLLM sorts caches by the layer number in their name
        self.context = TokenCache(maybe_prefix(prefix, "model.layers.0.token_ids"), config.expand_input_ids_maxlen)
        rows = vllm_config.scheduler_config.max_num_batched_tokens
        # CUDA graphs of the compiled model read their input at a fixed address
        self.inputs_embeds = torch.zeros(rows, config.hidden_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return E [T, D] of ids [T], without subwords: the input of draft heads (`hf.Target.embed`)."""
        return self.model.embed_tokens(input_ids)

    def embed_rows(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [T, D] of the ids [T] of a step's rows, subwords included."""
        embeds = self.model.embed_tokens(input_ids)
        context = self.context(input_ids)
        if context is None:
            return embeds
        known = len(context)  # vLLM may pad input_ids beyond its rows
        embeds[:known] += self.model.expand_embed_tokens(self.suffixes(context))
        return embeds

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        embeds = self.embed_rows(input_ids)
        held = self.inputs_embeds[: len(embeds)]
        held.copy_(embeds)
        return self.model(None, positions, intermediate_tensors, held)
