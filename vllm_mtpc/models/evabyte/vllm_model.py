"""EvaByte for vLLM: Llama's layers with EVA attention and norms that scale by 1 + weight.

Weights have the names of the published checkpoints. The target uses the first of eight lm_heads, which predicts the
next byte; head h is rows [V h, V (h + 1)) of lm_head.weight. The others can start a draft head (docs/internals.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.utils import set_weight_attrs

from vllm_mtpc.models.evabyte.attention import EvaAttention


class EvaByteAttention(LlamaAttention):
    """q, k, v, o projections and rotary embedding around EvaAttention; others: the parent's arguments, unused."""

    def __init__(
        self, config: Any, hidden_size: int, num_heads: int, quant_config: Any, prefix: str, **others: Any
    ) -> None:
        nn.Module.__init__(self)
        self.num_heads = num_heads // get_tensor_model_parallel_world_size()
        self.head_dim = hidden_size // num_heads
        self.q_size = self.kv_size = self.num_heads * self.head_dim
        self.max_position_embeddings = config.max_position_embeddings
        self.qkv_proj = QKVParallelLinear(
            hidden_size, self.head_dim, num_heads, bias=False, quant_config=quant_config, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = RowParallelLinear(
            hidden_size, hidden_size, bias=False, quant_config=quant_config, prefix=f"{prefix}.o_proj"
        )
        self._init_rotary_emb(config, quant_config)
        self.adaptive_phi, self.adaptive_mu_k = self._per_head(), self._per_head()
        sizes = config.window_size, config.chunk_size
        self.attn = EvaAttention(self.num_heads, self.head_dim, *sizes, prefix=f"{prefix}.attn")

    def _per_head(self) -> nn.Parameter:
        """Return a parameter [1, H, 1, 1, D], as in the checkpoint, of this rank's heads."""
        parameter = nn.Parameter(torch.zeros(1, self.num_heads, 1, 1, self.head_dim), requires_grad=False)
        set_weight_attrs(parameter, {"weight_loader": sharded_weight_loader(1)})
        return parameter

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        query, key, value = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        query, key = self.rotary_emb(positions, query, key)
        mu, phi = (p.view(self.num_heads, self.head_dim) for p in (self.adaptive_mu_k, self.adaptive_phi))
        output = torch.ops.vllm.mtpc_eva_attention(query, key, value, mu, phi, self.attn.layer_name)
        return self.o_proj(output)[0]


class EvaByteDecoderLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=EvaByteAttention)
        config = config or vllm_config.model_config.hf_config
        self.input_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)


class EvaByteForCausalLM(LlamaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=EvaByteDecoderLayer)
        self.model.norm = GemmaRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the weights; of lm_head only the first head's rows."""
        rows = self.config.vocab_size
        return super().load_weights(
            (name, weight[:rows] if name.endswith("lm_head.weight") else weight) for name, weight in weights
        )
