"""MtPC drafts from heads with a backbone, on vLLM's Model Runner V2.

A backbone (`vllm_mtpc.heads.backbone` says what it computes) is a few decoder layers that keep keys and values of the
text read so far, made from hidden states of several of the target's layers. Its attention layers are vLLM's own, so
vLLM gives them caches among the target's KV cache groups: block tables and slots of a step hold for them too, and with
them prefix caching, preemption and the rollback of drafts. Projections are divided over tensor-parallel ranks as
vLLM's are. Embeddings and lm_head are the target's.

After every target pass, for all rows of its batch (prompt chunks too, also in steps that draft nothing):
  1. context: the states that the target hands out (vLLM's auxiliary hidden states) go through one product, and each
     layer's keys and values of them into its cache at the target's slots. Rows of rejected drafts write what is wrong,
     at positions which the queries and then the next step write again before they read.
  2. queries: [x_1 | masks] of every request at the positions behind its last row, one pass. Their keys and values go
     into slots that the scheduler keeps for them (`num_lookahead_tokens`); each reads the text and, in both directions,
     the others. What leaves the final norm is the head's "hidden".

There are always as many queries as the head was trained with, also where fewer drafts are made: a query reads those
behind it. Where CUDA graphs hold the drafts they hold both steps (`graphs.py`), the context for as many rows as a step
verifies; what a batch with prompts has more is written before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3DecoderLayer
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.heads.base import Head
from vllm_mtpc.proposers.v2.gather import query_rows
from vllm_mtpc.proposers.v2.shared_modules import changed, eager_priorities
from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator

NAME = "mtpc.backbone.layers"  # in front of a layer's number among the target's
PACKED = {  # projections that vLLM keeps as one: its name, and which part of it they are
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class ServedBackbone(nn.Module):
    """`vllm_mtpc.heads.backbone.Backbone` made of vLLM's layers."""

    def __init__(self, config: HeadConfig, vllm_config: VllmConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.backbone_eps
        layer = Qwen3Config(
            hidden_size=size,
            num_hidden_layers=config.backbone_layers,
            num_attention_heads=config.backbone_heads,
            num_key_value_heads=config.backbone_kv_heads,
            head_dim=config.backbone_head_dim,
            intermediate_size=config.backbone_width,
            rms_norm_eps=eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.backbone_theta},
            max_position_embeddings=vllm_config.model_config.max_model_len,
        )
        below, cache = vllm_config.model_config.get_total_num_hidden_layers(), vllm_config.cache_config
        self.layers = nn.ModuleList(
            DFlashQwen3DecoderLayer(
                vllm_config, config=layer, layer_idx=index, cache_config=cache, prefix=f"{NAME}.{below + index}"
            )
            for index in range(config.backbone_layers)
        )
        self.fc = nn.Linear(len(config.aux_hidden_state_layer_ids) * size, size, bias=False).requires_grad_(False)
        self.hidden_norm, self.norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.mask_embedding = nn.Parameter(torch.empty(size), requires_grad=False)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """This rank's part of the checkpoint's tensors, and next to them the rows of qkv_proj that context needs."""
        parameters = dict(self.named_parameters())
        for name, weight in weights.items():
            part = name.removesuffix(".weight").rpartition(".")[2]
            packed, *shard = PACKED.get(part, (part,))
            parameter = parameters[name.replace(part, packed)]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight, *shard)
        for layer in self.layers:
            attention = layer.self_attn
            rows = attention.qkv_proj.weight[attention.q_size :].clone()
            attention.register_buffer("context_weight", rows, persistent=False)

    def write(self, states: Tensor, positions: Tensor, slots: list[Tensor] | None) -> None:
        """Keys and values of states[T, D] (what left `fc`), into each layer's slots [T]; None: there is no cache."""
        states = self.hidden_norm(states)
        for index, layer in enumerate(self.layers):
            attention = layer.self_attn
            shape = len(states), attention.num_kv_heads, attention.head_dim
            keys, values = F.linear(states, attention.context_weight).split(attention.kv_size, dim=-1)
            keys = attention.k_norm(keys.view(shape)).view(len(states), -1)
            keys = attention.rotary_emb(positions, keys)[0]
            if slots is not None:
                attn = attention.attn
                attn.impl.do_kv_cache_update(attn, keys.view(shape), values.view(shape), attn.kv_cache, slots[index])

    def forward(self, positions: Tensor, queries: Tensor) -> Tensor:
        """States [T, D] of queries[T, D]."""
        states, residual = queries, None
        for layer in self.layers:
            states, residual = layer(positions, states, residual)
        return self.norm(states, residual)[0]


def served_backbone(weights: Mapping[str, Tensor], vllm_config: VllmConfig, device: torch.device) -> ServedBackbone:
    """The backbone of a head with these tensors, run as it stands, not compiled: small kernels are the device's own."""
    compilation = changed(vllm_config.compilation_config, mode=CompilationMode.NONE, custom_ops=["all"])
    eager = changed(with_non_causal(vllm_config), compilation_config=compilation)
    with set_current_vllm_config(eager), set_default_torch_dtype(vllm_config.model_config.dtype), device:
        made = ServedBackbone(vllm_config.speculative_config.head, eager)
        made.load(weights)
        process_weights_after_loading(made, vllm_config.model_config, device)
    return made


def with_non_causal(vllm_config: VllmConfig) -> VllmConfig:
    """For which vLLM chooses attention that can look ahead."""
    return changed(vllm_config, attention_config=changed(vllm_config.attention_config, use_non_causal=True))


class BackboneSpeculator(MtpcSpeculator):
    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        head, size = self.speculative_config.head, self.hidden_size
        self.queries = head.window - head.sample_from_anchor  # of a request
        rows, whole = self.max_num_reqs * self.queries, {"dtype": torch.int64, "device": device}
        self.hidden_states = torch.zeros(self.max_num_reqs, self.queries, size, dtype=self.dtype, device=device)
        self.context = torch.zeros(self.max_num_tokens, size, dtype=self.dtype, device=device)
        self.unwritten = 0  # rows of it that are in no cache yet
        self.row_positions, self.row_slots = torch.zeros(rows, **whole), torch.zeros(0, rows, **whole)
        self.ends = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self.starts = torch.arange(self.max_num_reqs + 1, dtype=torch.int32, device=device) * self.queries
        self.metadata: dict[str, Any] | None = None  # of the queries' pass; None: there are no caches yet
        self.priorities = eager_priorities(vllm_config)
        # no pass of ours waits for other data-parallel engines
        self.pass_config = changed(
            vllm_config, parallel_config=changed(vllm_config.parallel_config, data_parallel_size=1)
        )

    @property
    def attn_vllm_config(self) -> VllmConfig:
        return with_non_causal(self.vllm_config)

    def _load_head(self, target_model: nn.Module, folder: str) -> Head:
        head = super()._load_head(target_model, folder)
        head.backbone = served_backbone(head.backbone.state_dict(), self.vllm_config, self.device)
        head.bind_embedding(target_model.embed_input_ids)
        target_model.set_aux_hidden_state_layers(tuple(self.speculative_config.aux_layers))
        return head

    def set_attn(self, model_state: Any, kv_cache_config: Any, block_tables: Any, *args: Any) -> None:
        super().set_attn(model_state, kv_cache_config, block_tables, *args)
        self.row_slots = self.row_slots.new_zeros(len(block_tables.block_sizes), self.row_slots.shape[1])
        groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        names = [layer.self_attn.attn.layer_name for layer in self.model.backbone.layers]
        self.group_of = [next(index for index, group in enumerate(groups) if name in group) for name in names]

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        is_fit = self.attn_cg_support.min_cg_support.value >= AttentionCGSupport.UNIFORM_BATCH.value
        for group in (group for groups in self.attn_groups for group in groups):
            builder = group.get_metadata_builder()
            if hasattr(builder, "aot_schedule"):  # FlashAttention 3 plans a pass inside of it, as graphs want it
                builder.aot_schedule = False
        super().init_cudagraph_manager(cudagraph_mode if is_fit else CUDAGraphMode.NONE)

    def _captured(self, num_reqs: int, num_drafts: int) -> Callable[[], None]:
        draft, rows = super()._captured(num_reqs, num_drafts), self._graph_rows(num_reqs)
        self.block_tables.slot_mappings.fill_(PAD_SLOT_ID)  # nothing is written
        self._place(num_reqs, torch.full((num_reqs,), self.max_model_len, dtype=torch.int32), for_graph=True)

        def run() -> None:
            self._write(0, rows)
            draft()

        return run

    def _graph_rows(self, num_reqs: int) -> int:
        """Rows whose context a graph for so many requests writes."""
        return min(num_reqs * (1 + self.num_speculative_steps), self.max_num_tokens)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor],  # [T, D] each, rows that pad a captured graph's batch included
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        self.unwritten = input_batch.num_tokens
        aux = torch.cat([states[: self.unwritten] for states in aux_hidden_states], dim=-1)
        torch.mm(aux, self.model.backbone.fc.weight.T, out=self.context[: self.unwritten])
        given = input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states
        drafts = super().propose(*given, *args, **kwargs)
        if attn_metadata is not None:
            self._write(0, self.unwritten)
        return drafts

    def _read(self, input_batch: InputBatch, last_hidden_states: Tensor, graph: Any) -> None:
        num_reqs = input_batch.num_reqs
        upper = (input_batch.seq_lens_cpu_upper_bound[:num_reqs] + self.queries).clamp(max=self.max_model_len)
        if graph is not None:
            upper = F.pad(upper, (0, graph.num_reqs - num_reqs), value=self.queries)
        self._place(len(upper), upper)
        self._write(0 if graph is None else self._graph_rows(graph.num_reqs), self.unwritten)
        self.unwritten = 0

    def _place(self, num_reqs: int, upper: Tensor, for_graph: bool = False) -> None:
        """Where the queries of R requests lie, and what attention is told of them; upper [R], on the host: they see."""
        tables, rows = self.block_tables, num_reqs * self.queries
        for group in set(self.group_of):
            query_rows(
                self.idx_mapping[:num_reqs],
                self.last_rows,
                self.target_input_buffers.positions,
                tables.input_block_tables[group],
                tables.block_sizes[group],
                self.max_model_len,
                self.queries,
                self.row_positions,
                self.row_slots[group],
                self.ends,
            )
        self.metadata = build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=num_reqs,
            num_tokens=rows,
            query_start_loc_gpu=self.starts[: num_reqs + 1],
            query_start_loc_cpu=torch.arange(num_reqs + 1, dtype=torch.int32) * self.queries,
            max_query_len=self.queries,
            seq_lens=self.ends[:num_reqs],
            max_seq_len=int(upper.max()),
            block_tables=[table[:num_reqs] for table in tables.input_block_tables],
            slot_mappings=self.row_slots[:, :rows],
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=upper,
            positions=self.row_positions[:rows],
            is_prefilling=self.draft_is_prefilling[:num_reqs],
            for_cudagraph_capture=for_graph,
            causal=False,
        )

    def _write(self, start: int, stop: int) -> None:
        """Keys and values of these rows of context."""
        if start < stop:
            slots = [self.block_tables.slot_mappings[group, start:stop] for group in self.group_of]
            with self.priorities.set_priority():
                positions = self.target_input_buffers.positions[start:stop]
                self.model.backbone.write(self.context[start:stop], positions, slots)

    def _warm_up(self) -> None:
        with self.priorities.set_priority():
            positions = torch.zeros(len(self.context), dtype=torch.int64, device=self.device)
            self.model.backbone.write(self.context, positions, None)
        most = max((batch for batch, drafts in enumerate(self.drafts_by_batch) if drafts), default=0)
        if most:
            self._states(most)
        super()._warm_up()

    def _draft(self, num_reqs: int, num_drafts: int) -> None:
        self.hidden_states[:num_reqs] = self._states(num_reqs)
        super()._draft(num_reqs, num_drafts)

    def _states(self, num_reqs: int) -> Tensor:
        """What the queries' pass leaves, [R, n, D]."""
        rows = num_reqs * self.queries
        queries = self.model.queries(self.first_tokens[:num_reqs]).flatten(0, 1)
        slots = {}
        if self.metadata is not None:
            slots = build_slot_mappings_by_layer(self.row_slots[:, :rows], self.kv_cache_config)
        context = set_forward_context(
            self.metadata,
            self.pass_config,
            num_tokens=rows,
            slot_mapping=slots,
            batch_descriptor=BatchDescriptor(num_tokens=rows),
        )
        with context, self.priorities.set_priority():
            return self.model.backbone(self.row_positions[:rows], queries).view(num_reqs, self.queries, -1)
