"""PTP drafts in two passes on vLLM's Model Runner V2 (Parallel Token Prediction, section 2.3 and appendix H.1).

Algorithm, per request, after the target has chosen the token x_1: one forward pass of the student reads

    [ x_1 | u_2 u_3 .. ]        x_1 as the target reads it, then uniform numbers instead of tokens, with the LoRA

after the request's committed tokens. The row of x_1 gives the target's distribution of x_2, from which u_2 picks: the
first draft is the token that verification will pick. The other drafts come from the auxiliary rows
(`vllm_mtpc.heads.ptp.distribution`): o-ptp takes the argmax of the row that carries the draft's own u, c-ptp picks by
that u from the row before. Verification picks with the same u, a hash of (seed, position) that both compute
(`verification.py`), so a draft is accepted where the student is right.

The student reads the KV cache of the committed tokens and writes to its own blocks (`groups.py`). An auxiliary row has
the position of the token that predicts the same token. There are no `draft_logits`: verification compares tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import init_attn_backend
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_mtpc.checkpoint.ptp_head import load_ptp
from vllm_mtpc.heads.ptp.distribution import draft_tokens, reads_u
from vllm_mtpc.proposers.config.switches import logger
from vllm_mtpc.proposers.heads.load import kept
from vllm_mtpc.proposers.heads.swap import copy_tensors
from vllm_mtpc.proposers.v2.lora import Gate, prepare_adapters
from vllm_mtpc.proposers.v2.ptp.groups import GroupBlocks, Writes, build_student, check_attention
from vllm_mtpc.proposers.v2.speculator import DraftGraphs, HeadSpeculator, replace_attributes
from vllm_mtpc.proposers.v2.verification import CoupledRejectionSampler, pick_tokens, u_of

# Attention backends that plan nothing on the host, so that a CUDA graph can hold the student's pass
CAPTURED = ("FLASH_ATTN", "TRITON_ATTN")
UNINFORMED = 0.5  # u of every row, for a head that was trained without u


class PtpSpeculator(HeadSpeculator):
    """PTP drafts from a second pass."""

    keeps_shapes = True  # a swapped head must have the served one's shapes

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        spec = self.speculative_config
        self.head, self.plan = spec.head, spec.plan(self.max_num_reqs)
        self.lead = self.head.first_row  # rows at the start of a group that draft nothing
        self.gate, self.writes = Gate(), Writes()
        num_rows, groups = self.max_pass_rows(), self.plan.max_groups
        self.prefix_lens = self.first_pos
        self.embeds = torch.zeros(num_rows, self.hidden_size, dtype=self.dtype, device=device)
        self.graph_states = torch.zeros_like(self.embeds[: self.plan.max_rows])  # output of captured passes
        self.row_positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.row_slots = torch.full((1, num_rows), PAD_SLOT_ID, dtype=torch.int64, device=device)
        self.group_ends = torch.zeros(groups, dtype=torch.int32, device=device)
        self.row_index = torch.arange(num_rows, device=device)
        self.group_index = torch.arange(groups, device=device)
        self.draft_index = torch.arange(self.num_speculative_steps, device=device)
        self.copied = torch.zeros(groups, dtype=torch.int64, device=device)  # the block that each group starts in
        self.pass_starts: dict[int, Tensor] = {}  # starts of the requests by their rows, where graphs read them
        self.graphs: DraftGraphs  # set by `init_cudagraph_manager`
        self.sampler: Any = None  # vLLM's, set before the first step
        self.merged_output: Any = None  # of a merged pass

    def max_pass_rows(self) -> int:
        return self.plan.max_rows

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        head = load_ptp(self.speculative_config.model_folder, self.dtype, self.device)
        self.target = target_model
        self.embedding, self.late = head.embedding, head.late
        self.set_verifier(CoupledRejectionSampler, target_model, "sampler")
        scale = self.head.lora_alpha / self.head.lora_rank
        student = build_student(target_model, head.lora, scale, self.gate, self.writes)
        parts = [part for module in (self.embedding, self.late) if module is not None for part in module.parameters()]
        student.kept = kept(parts)
        return student

    @torch.inference_mode()
    def prepare_swap(self, made: Any, target_model: nn.Module) -> Callable[[], None]:
        """Load the head of another speculative config; return what activates it (`heads/swap.py`)."""
        head = load_ptp(made.model_folder, self.dtype, self.device)
        scale = made.head.lora_alpha / made.head.lora_rank
        copy_adapters = prepare_adapters(self.model, head.lora, scale, target_model)

        def activate() -> None:
            copy_adapters()
            copy_tensors(self.embedding, head.embedding)
            if self.late is not None:
                copy_tensors(self.late, head.late)

        return activate

    def set_attn(self, model_state: Any, kv_cache_config: KVCacheConfig, block_tables: BlockTables, *args: Any) -> None:
        super().set_attn(model_state, kv_cache_config, block_tables, *args)
        plan, config = self.plan, self.vllm_config
        # metadata builders of the student's passes get more sequences than the engine has, and no graphs
        scheduler = replace_attributes(config.scheduler_config, max_num_seqs=self.max_num_reqs + plan.max_groups)
        compilation = replace_attributes(config.compilation_config, cudagraph_mode=CUDAGraphMode.NONE)
        config = replace_attributes(config, scheduler_config=scheduler, compilation_config=compilation)
        self.aux_groups, _, _ = init_attn_backend(kv_cache_config, config, self.device)
        check_attention(kv_cache_config, self.aux_groups)
        block_size = block_tables.block_sizes[0]
        reserved = plan.num_blocks(block_size)
        # the cache's last blocks; vLLM's profiling cache has fewer blocks, and its content is not used
        own = (torch.arange(reserved, device=self.device) + kv_cache_config.num_blocks - reserved).clamp_(min=0)
        own = own.view(plan.max_groups, plan.blocks_per_group(block_size))
        self.group_blocks = GroupBlocks(own, block_size, block_tables.input_block_tables[0].shape[1])

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        mode, others = cudagraph_mode, {group.backend.get_name() for group in self.aux_groups[0]} - {*CAPTURED}
        if others and mode.decode_mode() == CUDAGraphMode.FULL:
            text = "method 'ptp': drafts run without CUDA graphs, attention backend %s plans on the host; %s"
            logger.warning(text, ", ".join(sorted(others)), "add --attention-backend FLASH_ATTN")
            mode = CUDAGraphMode.NONE
        for group in self.aux_groups[0] if mode.decode_mode() == CUDAGraphMode.FULL else ():
            group.get_metadata_builder(0).aot_schedule = False  # FlashAttention 3: a graph reads no schedule of a step
        buckets = [self.plan.bucket(batch) for batch in range(1, self.max_num_reqs + 1)]
        aux_rows = [0, *(bucket.sizes[0] if bucket else 0 for bucket in buckets)]

        def fits(num_reqs: int, num_aux: int) -> bool:
            return num_reqs <= len(self.copied) and num_reqs * (1 + num_aux) <= len(self.embeds)

        self.graphs = DraftGraphs(self.vllm_config, self.device, mode, aux_rows, fits)

    def _prepare_capture(self, num_reqs: int, num_aux: int) -> Callable[[], None]:
        self._pad_requests(0, num_reqs, 1 + num_aux)
        self._prepare_pass(num_aux, torch.full((num_reqs,), self.max_model_len, dtype=torch.int32))
        num_rows = num_reqs * (1 + num_aux)

        def run() -> None:
            self.graph_states[:num_rows] = self._run_model(num_rows)

        return run

    def _draft_step(
        self, input_batch: InputBatch, states: Tensor, num_sampled: Tensor, num_drafts: int, dummy_run: bool
    ) -> None:
        drafts = self.draft_tokens[: input_batch.num_reqs].zero_()
        if not dummy_run:
            self._generate_draft(input_batch, num_sampled, drafts)

    def _generate_draft(self, input_batch: InputBatch, num_sampled: Tensor, drafts: Tensor) -> None:
        """Fill drafts [R, K], which are zeros, as far as there are rows for them."""
        num_reqs = input_batch.num_reqs
        bucket = self.plan.bucket(num_reqs)
        if bucket is None:
            return
        num_aux = bucket.sizes[0]
        hidden = self._run_draft_pass(input_batch, num_aux)  # [R, 1 + A, D]
        count = min(self.num_speculative_steps, num_aux + 1 - self.lead)
        rows = hidden[:, 1 + self.lead : self.lead + count]  # [R, count - 1, D], of all drafts but the first
        keys = self.prefix_lens[:num_reqs, None] + self.draft_index[1:count]
        slots = input_batch.idx_mapping[:num_reqs]
        if self.late is not None:
            drafts[:, 0] = self._sample_first_draft(self.target.compute_logits(hidden[:, 0]), input_batch)
            if count > 1:
                drafts[:, 1:count] = self._sample_sequential(rows, drafts[:, 0], keys, slots)
            return
        logits = self._compute_logits(torch.cat([hidden[:, :1], rows], dim=1))  # one product for all
        drafts[:, 0] = self._sample_first_draft(logits[:, 0], input_batch)
        if count > 1:
            drafts[:, 1:count] = self._sample_parallel(logits[:, 1:], keys, slots)

    def _run_draft_pass(self, input_batch: InputBatch, num_aux: int) -> Tensor:
        """Return the student's states [R, 1 + A, D] of [x_1 | u ..] after each request's committed tokens."""
        num_reqs, width = input_batch.num_reqs, 1 + num_aux
        num_rows, prefix = num_reqs * width, self.prefix_lens[:num_reqs]
        at = prefix[:, None] + self.row_index[:width]  # [R, 1 + A], index of each row in its text
        keys = at[:, :num_aux]  # an auxiliary row carries the u of the token at its index
        embeds = self.embeds[:num_rows].view(num_reqs, width, -1)
        embeds[:, 0] = self.target.embed_input_ids(self.first_tokens[:num_reqs])
        embeds[:, 1:] = self._embed_u(keys, input_batch.idx_mapping[:num_reqs])
        positions = self.row_positions[:num_rows].view(num_reqs, width)
        positions[:, 0] = prefix
        positions[:, 1:] = keys if self.lead else at[:, 1:]
        positions.clamp_(max=self.max_model_len - 1)

        tables = self.block_tables.input_block_tables[0][:num_reqs]
        _, self.copied[:num_reqs], _ = self.group_blocks.fill_tables(prefix, tables)
        group = self.group_index[:num_reqs, None].expand(-1, width)
        self.row_slots[0, :num_rows] = self.group_blocks.slots(group, prefix[:, None], at).flatten()
        self.group_ends[:num_reqs] = prefix + width
        upper = input_batch.seq_lens_cpu_upper_bound[:num_reqs] + width + 1
        graph = self.graphs.find(num_reqs, num_aux)
        if graph is None:
            self._prepare_pass(num_aux, upper)
            return self._run_model(num_rows).view(num_reqs, width, -1)
        self._pad_requests(num_reqs, graph.num_reqs, width)
        self._prepare_pass(num_aux, torch.cat([upper, upper.new_full((graph.num_reqs - num_reqs,), width)]))
        self.graphs.run_fullgraph(graph)
        return self.graph_states[:num_rows].view(num_reqs, width, -1)

    def _pad_requests(self, start: int, stop: int, width: int) -> None:
        """Make requests start .. stop - 1 padding: they attend to their own rows and write to no slot."""
        self.row_slots[0, start * width : stop * width] = PAD_SLOT_ID
        self.group_ends[start:stop] = width
        self.copied[start:stop] = 0

    def _prepare_pass(self, num_aux: int, upper: Tensor) -> None:
        """Set up the pass over [x_1 | u ..] of R requests with parts of buffers alone, as CUDA graphs need it.

        upper: [R], on the host, bounds on the tokens that each request attends to.
        """
        num_reqs, width = len(upper), 1 + num_aux
        if width not in self.pass_starts:
            self.pass_starts[width] = torch.arange(len(self.copied) + 1, dtype=torch.int32, device=self.device) * width
        starts = self.pass_starts[width]
        self.gate.choose(0, num_reqs, width, lead=1)
        writes = self.writes
        writes.num_real, writes.source, writes.target = 0, self.copied[:num_reqs], self.group_blocks.own[:num_reqs, 0]
        self._build_metadata(
            self.aux_groups,
            num_reqs * width,
            upper,
            query_start_loc_gpu=starts[: num_reqs + 1],
            query_start_loc_cpu=torch.arange(num_reqs + 1, dtype=torch.int32) * width,
            max_query_len=width,
            seq_lens=self.group_ends[:num_reqs],
            block_tables=[self.group_blocks.tables[:num_reqs]],
            is_prefilling=torch.zeros(num_reqs, dtype=torch.bool),
        )

    def _run_model(self, num_rows: int) -> Tensor:
        forward = partial(self.model, input_ids=None, inputs_embeds=self.embeds[:num_rows])
        return self._run_pass(num_rows, lambda positions: forward(positions=positions))

    def _warm_up(self) -> None:
        self.metadata, self.writes.source = None, None
        self.gate.choose(0, 1, self.plan.max_rows)
        hidden = self._run_model(len(self.embeds))
        drafted = max((bucket.max_batch for bucket in self.plan.buckets), default=0) * self.num_speculative_steps
        logits = self.target.compute_logits(hidden.new_zeros(drafted, hidden.shape[1]))
        if reads_u(self.head):
            draft_tokens(self.head, logits, torch.zeros(drafted, device=self.device))

    def _compute_u(self, keys: Tensor, slots: Tensor) -> Tensor:
        states, requests = self.sampler.sampling_states, slots[:, None].expand_as(keys).flatten()
        return u_of(states.seeds.gpu, states.temperature.gpu, requests, keys.flatten()).view_as(keys)

    def _embed_u(self, keys: Tensor, slots: Tensor) -> Tensor:
        u = self._compute_u(keys, slots) if self.head.informed else torch.full_like(keys, UNINFORMED, dtype=torch.float)
        return self.embedding(u)

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        return self.target.compute_logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def _sample_first_draft(self, logits: Tensor, input_batch: InputBatch) -> Tensor:
        """Return x_2 [R] as verification will pick it unless a grammar forbids it; logits [R, V] of the row of x_1."""
        num_reqs = input_batch.num_reqs
        slots, prefix = input_batch.idx_mapping[:num_reqs], self.prefix_lens[:num_reqs]
        slots_np, zeros = input_batch.idx_mapping_np[:num_reqs], torch.zeros_like(slots, dtype=torch.int32)
        rows = slots, slots, slots_np, prefix, self.first_tokens[:num_reqs], zeros
        upper = input_batch.seq_lens_cpu_upper_bound.numpy()[:num_reqs] + 1
        processed = self.sampler.apply_sampling_params(logits, *rows, upper)
        return pick_tokens(processed, self.sampler.sampling_states, slots, prefix)

    def _sample_parallel(self, logits: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
        """Return drafts [R, k] from logits [R, k, V], which include the temperature; keys: position before each."""
        best = logits.argmax(dim=-1)
        if not reads_u(self.head):
            return best
        picked = draft_tokens(self.head, logits.flatten(0, 1), self._compute_u(keys, slots).flatten()).view_as(best)
        return torch.where(self._is_greedy(slots)[:, None], best, picked)

    def _sample_sequential(self, hidden: Tensor, first: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
        """Return drafts [R, k] of the late network from states [R, k, D] and the token `first` [R] before them."""

        def choose(state: Tensor, k: int) -> Tensor:
            logits = self.target.compute_logits(state)
            return self._sample_parallel(logits[:, None], keys[:, k : k + 1], slots)[:, 0]

        assert self.late is not None  # the callers ask
        return self.late.draft(hidden, first, self.target.embed_input_ids, choose)

    def _is_greedy(self, slots: Tensor) -> Tensor:
        return self.sampler.sampling_states.temperature.gpu[slots] == 0
