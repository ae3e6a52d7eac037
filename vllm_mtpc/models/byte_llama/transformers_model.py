"""Byte-Llama on transformers: Llama, but the embedding of a token is E[id] + X[the longest subword that ends here].

As in `vllm_model.py`; a subword lies within one document of a packed row.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaModel, PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from vllm_mtpc.models.byte_llama.config import TABLE, ByteLlamaConfig, check_byte_llama
from vllm_mtpc.models.byte_llama.suffixes import ABSENT, SuffixTable, build_suffixes
from vllm_mtpc.models.transformers_cache import append_cached, positions_of


class ByteLlamaModel(LlamaModel):
    config_class = ByteLlamaConfig

    def __init__(self, config: ByteLlamaConfig) -> None:
        check_byte_llama(config)
        super().__init__(config)
        self.expand_embed_tokens = nn.Embedding(config.expand_input_ids_vocab_size, config.hidden_size)

    @cached_property
    def suffixes(self) -> SuffixTable:
        """The subword table, read from the raw config.json: the config object does not store it."""
        values, _ = PretrainedConfig.get_config_dict(self.config.name_or_path)
        return build_suffixes(values.get(TABLE), self.config)

    def embed(self, input_ids: Tensor, position_ids: Tensor, cache: Any = None) -> Tensor:
        """Return embeddings [B, m, D] of input_ids[B, m] at position_ids[B, m], after the cached tokens."""
        ids = append_cached(cache, "token_ids", input_ids)  # [B, past + m]
        length, longest = input_ids.shape[1], self.config.expand_input_ids_maxlen
        back = torch.arange(longest, device=ids.device)
        at = torch.arange(ids.shape[1] - length, ids.shape[1], device=ids.device)[:, None] - back  # [m, L]
        context = ids[:, at.clamp(min=0)].masked_fill(position_ids[..., None] < back, ABSENT)  # [B, m, L]
        subwords = self.suffixes.to(ids.device)(context.flatten(0, 1)).view_as(input_ids)
        return self.embed_tokens(input_ids) + self.expand_embed_tokens(subwords)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **more: Any,
    ) -> BaseModelOutputWithPast:
        if inputs_embeds is None:
            at = positions_of(input_ids, past_key_values) if position_ids is None else position_ids
            inputs_embeds = self.embed(input_ids, at, past_key_values)
        more |= {"position_ids": position_ids, "past_key_values": past_key_values}
        return super().forward(inputs_embeds=inputs_embeds, **more)


class ByteLlamaForCausalLM(LlamaForCausalLM):
    config_class = ByteLlamaConfig

    def __init__(self, config: ByteLlamaConfig) -> None:
        super().__init__(config)
        self.model = ByteLlamaModel(config)
        self.post_init()
