"""MtPC drafts of heads with a backbone, on vLLM's Model Runner V2.

The layers of a backbone (`vllm_mtpc/heads/trunk/backbone.py`) are vLLM's own, with caches in the target's KV cache
groups, sharded over tensor-parallel ranks. Embeddings and lm_head are the target's.

Algorithm, after every target forward pass, for all rows of its batch:
  1. context: the target's auxiliary hidden states go through one product, and a second one computes from its normalised
     result the keys and values of all layers, which each layer's cache stores at the target's slots. Rows of rejected
     drafts store wrong ones, at positions that the queries and then the next step write again before they read.
  2. queries: [x_1 | masks] of every request at the positions after its last row, in one pass. Their keys and values go
     to slots that the scheduler reserves (`num_lookahead_tokens`). Each query reads the text and all other queries. The
     states after the final norm are the head's input.

The context is written in steps without drafts too. CUDA graphs hold both, the context of the rows that a step verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3DecoderLayer, DFlashQwen3Model
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.triton_utils import triton
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.head import Head
from vllm_mtpc.proposers.v2.draft_graphs import replace_attributes
from vllm_mtpc.proposers.v2.gather import place_query_rows
from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator, TargetPass

NAME = "mtpc.backbone.layers"  # in front of a layer's number among the target's


class ServedBackbone(nn.Module):
    """`vllm_mtpc.heads.trunk.backbone.Backbone` made of vLLM's layers."""

    def __init__(self, config: HeadConfig, vllm_config: VllmConfig) -> None:
        super().__init__()
        size, options = config.hidden_size, config.trunk
        layer = Qwen3Config(
            hidden_size=size,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.kv_heads,
            head_dim=options.head_dim,
            intermediate_size=options.width,
            rms_norm_eps=options.eps,
            rope_parameters={"rope_type": "default", "rope_theta": options.theta},
            max_position_embeddings=vllm_config.model_config.max_model_len,
        )
        below, cache = vllm_config.model_config.get_total_num_hidden_layers(), vllm_config.cache_config
        self.layers = nn.ModuleList(
            DFlashQwen3DecoderLayer(
                vllm_config, config=layer, layer_idx=index, cache_config=cache, prefix=f"{NAME}.{below + index}"
            )
            for index in range(options.layers)
        )
        self.fc = nn.Linear(len(options.aux_hidden_state_layer_ids) * size, size, bias=False).requires_grad_(False)
        self.hidden_norm, self.norm = RMSNorm(size, options.eps), RMSNorm(size, options.eps)
        self.key_norm = RMSNorm(options.head_dim, options.eps, has_weight=False)
        self.mask_embedding = nn.Parameter(torch.empty(size), requires_grad=False)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load this rank's part of the checkpoint's tensors, and copy what the context needs of all layers."""
        AutoWeightsLoader(self).load_weights(weights.items(), mapper=DFlashQwen3Model.hf_to_vllm_mapper)
        each = [layer.self_attn for layer in self.layers]
        rows = torch.cat([attention.qkv_proj.weight.data[attention.q_size :] for attention in each])
        self.register_buffer("context_weight", rows, persistent=False)  # [L * (keys, values) * kv heads * head_dim, D]
        norms = torch.stack([attention.k_norm.weight.data for attention in each])
        self.register_buffer("key_norms", norms[:, None], persistent=False)  # [L, 1, head_dim]

    def write_context(self, aux: Tensor, positions: Tensor, slots: list[Tensor] | None) -> None:
        """Write keys and values of auxiliary states aux [T, L * D] to each layer's slots [T]; None: only compute."""
        own = self.layers[0].self_attn
        rows = F.linear(self.hidden_norm(aux @ self.fc.weight.T), self.context_weight)
        keys, values = rows.view(len(aux), len(self.layers), 2, own.num_kv_heads, own.head_dim).unbind(2)
        keys = self.key_norm(keys).mul_(self.key_norms)
        keys = own.rotary_emb(positions, keys.flatten(1))[0].view_as(keys)  # all layers' keys, as heads of one token
        for index, slot in enumerate(slots or ()):
            attn = self.layers[index].self_attn.attn
            attn.impl.do_kv_cache_update(attn, keys[:, index], values[:, index], attn.kv_cache, slot)

    def forward(self, positions: Tensor, queries: Tensor) -> Tensor:
        states, residual = queries, None
        for layer in self.layers:
            states, residual = layer(positions, states, residual)
        return self.norm(states, residual)[0]


class BackboneSpeculator(MtpcSpeculator):
    """The drafts of a head with a backbone."""

    attends, copies_states = True, False

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        head, size = self.speculative_config.head, self.hidden_size
        self.num_queries = head.window - head.trunk.sample_from_anchor  # of a request
        num_rows, whole = self.max_num_reqs * self.num_queries, {"dtype": torch.int64, "device": device}
        self.hidden_states = torch.zeros(self.max_num_reqs, self.num_queries, size, dtype=self.dtype, device=device)
        rows = min(self.max_num_tokens, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
        self.aux = torch.zeros(rows, len(self.speculative_config.aux_layers) * size, dtype=self.dtype, device=device)
        self.unwritten = 0  # rows of `aux`, the input of graphs, whose context is in no cache yet
        self.row_positions, self.row_slots = torch.zeros(num_rows, **whole), torch.zeros(0, num_rows, **whole)
        self.ends = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self.starts = torch.arange(self.max_num_reqs + 1, dtype=torch.int32, device=device) * self.num_queries

    @property
    def attn_vllm_config(self) -> VllmConfig:
        """The config for which vLLM chooses a backend with attention to later positions."""
        attention = replace_attributes(self.vllm_config.attention_config, use_non_causal=True)
        return replace_attributes(self.vllm_config, attention_config=attention)

    def _load_head(self, target_model: nn.Module) -> Head:
        head = super()._load_head(target_model)
        # the backbone runs eagerly, with the device's kernels
        compilation = replace_attributes(
            self.vllm_config.compilation_config, mode=CompilationMode.NONE, custom_ops=["all"]
        )
        eager, weights = replace_attributes(self.attn_vllm_config, compilation_config=compilation), head.trunk.backbone
        with set_current_vllm_config(eager), set_default_torch_dtype(self.dtype), self.device:
            head.trunk.backbone = ServedBackbone(self.speculative_config.head, eager)
            head.trunk.backbone.load_weights(weights.state_dict())
            process_weights_after_loading(head.trunk.backbone, self.vllm_config.model_config, self.device)
        target_model.set_aux_hidden_state_layers(tuple(self.speculative_config.aux_layers))
        return head

    def set_attn(self, model_state: Any, kv_cache_config: Any, block_tables: Any, *args: Any) -> None:
        super().set_attn(model_state, kv_cache_config, block_tables, *args)
        self.row_slots = self.row_slots.new_zeros(len(block_tables.block_sizes), self.row_slots.shape[1])
        groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        names = [layer.self_attn.attn.layer_name for layer in self.model.trunk.backbone.layers]
        self.group_of = [next(index for index, group in enumerate(groups) if name in group) for name in names]

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        is_supported = self.attn_cg_support.min_cg_support.value >= AttentionCGSupport.UNIFORM_BATCH.value
        for group in (group for groups in self.attn_groups for group in groups):
            builder = group.get_metadata_builder()
            if hasattr(builder, "aot_schedule"):  # FlashAttention 3: a graph reads no schedule of a step
                builder.aot_schedule = False
        super().init_cudagraph_manager(cudagraph_mode if is_supported else CUDAGraphMode.NONE)

    def _prepare_capture(self, num_reqs: int, num_drafts: int) -> Callable[[], None]:
        draft, num_rows = super()._prepare_capture(num_reqs, num_drafts), self._max_graph_rows(num_reqs)
        self.block_tables.slot_mappings.fill_(PAD_SLOT_ID)  # nothing is written
        upper = torch.full((num_reqs,), self.max_model_len, dtype=torch.int32)
        self._place_queries(num_reqs)
        self._build_query_metadata(upper, for_capture=True)
        metadata, groups = self.metadata, [group for groups in self.attn_groups for group in groups]

        def run() -> None:
            self._write_context(self.aux[:num_rows], 0)
            if self.supports_decode_metadata_update:
                self._place_queries(num_reqs)
                for group in groups:
                    group.update_draft_decode_metadata(metadata)
            draft()

        return run

    def _max_graph_rows(self, num_reqs: int) -> int:
        return min(num_reqs * (1 + self.num_speculative_steps), len(self.aux))

    def _read_states(self, done: TargetPass) -> Tensor:
        num_rows = done.batch.num_tokens
        self.unwritten = min(num_rows, len(self.aux))
        torch.cat([states[: self.unwritten] for states in done.aux_states], dim=-1, out=self.aux[: self.unwritten])
        if self.unwritten < num_rows and done.attn_metadata is not None:
            rest = torch.cat([states[self.unwritten : num_rows] for states in done.aux_states], dim=-1)
            self._write_context(rest, self.unwritten)
        return done.states

    def _finish_step(self) -> None:
        self._write_context(self.aux[: self.unwritten], 0)

    def _prepare_inputs(self, input_batch: InputBatch, graph: Any) -> None:
        num_reqs = input_batch.num_reqs if graph is None else graph.num_reqs
        if graph is None or not self.supports_decode_metadata_update:  # else the graph does so
            self._place_queries(num_reqs)
            upper = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs] + self.num_queries
            upper = F.pad(upper.clamp(max=self.max_model_len), (0, num_reqs - len(upper)), value=self.num_queries)
            self._build_query_metadata(upper)
        start = 0 if graph is None else self._max_graph_rows(graph.num_reqs)
        self._write_context(self.aux[start : self.unwritten], start)
        self.unwritten = 0

    def _place_queries(self, num_reqs: int) -> None:
        """Set positions and slots of the queries, and the ends of their texts."""
        tables = self.block_tables
        for group in set(self.group_of):
            place_query_rows[(num_reqs,)](
                slot_ptr=self.idx_mapping, row_ptr=self.last_rows, read_ptr=self.target_input_buffers.positions,
                table_ptr=tables.input_block_tables[group], table_stride=tables.input_block_tables[group].stride(0),
                positions_ptr=self.row_positions, slots_ptr=self.row_slots[group], ends_ptr=self.ends,
                block_size=tables.block_sizes[group], max_len=self.max_model_len, queries=self.num_queries,
                PAD=PAD_SLOT_ID, BLOCK=triton.next_power_of_2(self.num_queries),
            )  # fmt: skip

    def _build_query_metadata(self, upper: Tensor, for_capture: bool = False) -> None:
        """Set the attention metadata of the queries; upper: [R], on the host, bounds on the length of each request."""
        num_reqs = len(upper)
        self._build_metadata(
            self.attn_groups,
            num_reqs * self.num_queries,
            upper,
            query_start_loc_gpu=self.starts[: num_reqs + 1],
            query_start_loc_cpu=torch.arange(num_reqs + 1, dtype=torch.int32) * self.num_queries,
            max_query_len=self.num_queries,
            seq_lens=self.ends[:num_reqs],
            block_tables=[table[:num_reqs] for table in self.block_tables.input_block_tables],
            is_prefilling=self.draft_is_prefilling[:num_reqs],
            for_cudagraph_capture=for_capture,
            causal=False,
        )

    def _write_context(self, aux: Tensor, start: int) -> None:
        """Write the context of auxiliary states aux [T, L * D], those of the batch's rows from `start` on."""
        if len(aux):
            rows = slice(start, start + len(aux))
            slots = [self.block_tables.slot_mappings[group, rows] for group in self.group_of]
            with self.priorities.set_priority():
                self.model.trunk.backbone.write_context(aux, self.target_input_buffers.positions[rows], slots)

    def _warm_up(self) -> None:
        aux = self.aux.new_zeros(self.max_num_tokens, self.aux.shape[1])
        positions = torch.zeros(len(aux), dtype=torch.int64, device=self.device)
        with self.priorities.set_priority():
            self.model.trunk.backbone.write_context(aux, positions, None)
        max_reqs = max((batch for batch, drafts in enumerate(self.drafts_by_batch) if drafts), default=0)
        if max_reqs:
            self._run_model(max_reqs)
        super()._warm_up()

    def _generate_draft(self, num_reqs: int, num_drafts: int) -> None:
        self.hidden_states[:num_reqs] = self._run_model(num_reqs)
        super()._generate_draft(num_reqs, num_drafts)

    def _run_model(self, num_reqs: int) -> Tensor:
        queries = self.model.trunk.queries(self.first_tokens[:num_reqs]).flatten(0, 1)
        forward = partial(self.model.trunk.backbone, queries=queries)
        return self._run_pass(num_reqs * self.num_queries, forward).view(num_reqs, self.num_queries, -1)
