"""EvaByte and Byte-Llama on transformers, with the names and shapes of the published checkpoints.

EvaByte in closed form: every row attends to its window and to summaries of earlier windows.

    out_t = softmax over { s q_t.k_j : window(t) W <= j <= t } and { s q_t.kbar_c : c before window(t) }

kbar_c and its value are means of chunk c, weighted by adaptive_mu_k and adaptive_phi. lm_head has a block of V rows for
each of eight heads, the first for the next byte. Windows and chunks are counted within a document of a packed row, by
its positions.

Byte-Llama is Llama, but the embedding of a token is E[id] + X[the longest subword that ends here]. A subword lies
within one document of a packed row.

Token ids and positions are kept on the key-value cache of transformers.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaModel, PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from vllm_mtpc.models.byte_llama.config import (
    ABSENT,
    TABLE,
    ByteLlamaConfig,
    SuffixTable,
    build_suffixes,
    check_byte_llama,
)  # fmt: skip
from vllm_mtpc.models.evabyte.config import EvaByteConfig, check_evabyte


def append_cached(cache: Any, name: str, new: Tensor) -> Tensor:
    """Append `new`[B, m] to the values stored as `name` on a cache, if any, and return all of them, [B, past + m]."""
    if cache is None:
        return new
    if (kept := getattr(cache, name, None)) is not None:
        new = torch.cat([kept, new], 1)
    setattr(cache, name, new)
    return new


def positions_of(tokens: Tensor, cache: Any) -> Tensor:
    """Return the default positions [B, m] of tokens[B, m, ...] after the cached ones."""
    past = 0 if cache is None else cache.get_seq_length()
    return torch.arange(past, past + tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])


class Reads(NamedTuple):
    """Indices and masks of a forward pass, shared by all layers."""

    chunk: Tensor  # [B, M, C] tokens of each whole chunk
    mask: Tensor  # [B, 1, m, M + S] summaries, then tokens


def plan(positions: Tensor, rows: int, config: EvaByteConfig) -> Reads:
    """Return the `Reads` of the last `rows` of the tokens at positions[B, S]."""
    window, size = config.window_size, config.chunk_size
    token = torch.arange(positions.shape[1], device=positions.device)
    document = (positions == 0).cumsum(1)  # [B, S]
    is_end = positions % size == size - 1  # of a chunk
    max_chunks = int(is_end.sum(1).max())
    end = is_end.int().argsort(dim=1, descending=True, stable=True)[:, :max_chunks]  # [B, M] in order
    chunk = (end[..., None] - torch.arange(size - 1, -1, -1, device=end.device)).clamp(min=0)

    row, at = token[-rows:], positions[:, -rows:, None]  # [m], [B, m, 1]
    first = at // window * window  # of each row's window
    of_row = document[:, -rows:, None]
    is_near = (document[:, None] == of_row) & (positions[:, None] >= first) & (token <= row[:, None])
    is_past = (document.gather(1, end)[:, None] == of_row) & (positions.gather(1, end)[:, None] < first)
    is_past &= is_end.gather(1, end)[:, None]
    return Reads(chunk, torch.cat([is_past, is_near], 2)[:, None])


class EvaByteNorm(GemmaRMSNorm):
    """RMS norm whose scale is 1 + weight, in float32."""

    unit_offset = True


class EvaByteAttention(nn.Module):
    def __init__(self, config: EvaByteConfig, layer: int) -> None:
        super().__init__()
        width, self.heads, self.layer = config.hidden_size, config.num_attention_heads, layer
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(width, width, bias=False))
        for name in ("adaptive_phi", "adaptive_mu_k"):
            self.register_parameter(name, nn.Parameter(torch.zeros(1, self.heads, 1, 1, width // self.heads)))

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, past_key_values: Any, reads: Reads, **_: Any
    ) -> tuple[Tensor, None]:
        """Return [B, m, D] for hidden_states[B, m, D], and None."""
        query, key, value = (
            proj(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer)
        mean_key, mean_value = self.summaries(key, value, reads.chunk)
        keys, values = torch.cat([mean_key, key], 2), torch.cat([mean_value, value], 2)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=reads.mask)
        return self.o_proj(attended.transpose(1, 2).flatten(2)), None

    def summaries(self, key: Tensor, value: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, M, D / H] of the chunks[B, M, C] of key, value[B, H, S, D / H]."""
        batch = torch.arange(len(key), device=key.device)[:, None, None]
        keys, values = (states.transpose(1, 2)[batch, chunk].movedim(3, 1).float() for states in (key, value))
        scale = key.shape[-1] ** -0.5
        mu, phi = self.adaptive_mu_k.float(), self.adaptive_phi.float()
        alpha = (mu * keys).sum(-1, keepdim=True).softmax(3)
        beta = (((phi * keys).sum(-1, keepdim=True) - keys.square().sum(-1, keepdim=True) / 2) * scale).softmax(3)
        return (alpha * keys).sum(3).to(key.dtype), (beta * values).sum(3).to(value.dtype)


class EvaByteLayer(LlamaDecoderLayer):
    def __init__(self, config: EvaByteConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.self_attn = EvaByteAttention(config, layer)
        self.input_layernorm = EvaByteNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = EvaByteNorm(config.hidden_size, config.rms_norm_eps)


class EvaByteModel(LlamaModel):
    """Input ids to states after the final norm."""

    config_class = EvaByteConfig

    def __init__(self, config: EvaByteConfig) -> None:
        check_evabyte(config)
        super().__init__(config)
        self.layers = nn.ModuleList(EvaByteLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = EvaByteNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **more: Any,
    ) -> BaseModelOutputWithPast:
        """Padding needs no mask: a token at position 0 starts a document, which does not attend to earlier tokens."""
        rows = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        at = positions_of(rows, past_key_values) if position_ids is None else position_ids
        reads = plan(append_cached(past_key_values, "positions", at), rows.shape[1], self.config)
        return super().forward(
            inputs_embeds=rows, position_ids=at, past_key_values=past_key_values, reads=reads, **more
        )


class EvaByteForCausalLM(LlamaForCausalLM):
    """With lm_head [heads V, D]."""

    config_class = EvaByteConfig
    _supports_attention_backend = False  # EVA attention is implemented here

    def __init__(self, config: EvaByteConfig) -> None:
        super().__init__(config)
        self.model = EvaByteModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.num_pred_heads * config.vocab_size, bias=False)
        self.post_init()

    def forward(self, *args: Any, **more: Any) -> CausalLMOutputWithPast:
        """Return the logits of the next byte."""
        output = super().forward(*args, **more)
        output.logits = output.logits[..., : self.config.vocab_size]
        return output


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
