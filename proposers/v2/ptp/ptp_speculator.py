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

CUDA graphs hold the pass with the drafts that depend on no other draft, and the drafts of a late network. Between the
two the first draft is picked from the distribution that vLLM's sampler returns, whose kernels depend on the requests.
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
from vllm_mtpc.heads.ptp.student import UNUSED_U
from vllm_mtpc.kernels.pick import select_tokens
from vllm_mtpc.proposers.options.switches import logger
from vllm_mtpc.proposers.v2.draft_graphs import DraftGraphs, replace_attributes
from vllm_mtpc.proposers.v2.lora import Gate
from vllm_mtpc.proposers.v2.ptp.groups import GroupBlocks, Writes, build_student, check_attention
from vllm_mtpc.proposers.v2.speculator import HeadSpeculator
from vllm_mtpc.proposers.v2.verification import CoupledRejectionSampler, u_of
from vllm_mtpc.proposers.worker.load import kept

# Attention backends that plan nothing on the host, so that a CUDA graph can hold the student's pass
CAPTURED = ("FLASH_ATTN", "TRITON_ATTN")


class PtpSpeculator(HeadSpeculator):
    """PTP drafts from a second pass."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        spec = self.speculative_config
        self.head, self.plan = spec.head, spec.row_groups(self.max_num_reqs)
        self.lead = self.head.first_row  # rows at the start of a group that draft nothing
        self.gate, self.writes = Gate(), Writes()
        num_rows, groups = self.max_pass_rows(), self.plan.max_groups
        self.embeds = torch.zeros(num_rows, self.hidden_size, dtype=self.dtype, device=device)
        self.row_positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.row_slots = torch.full((1, num_rows), PAD_SLOT_ID, dtype=torch.int64, device=device)
        self.group_ends = torch.zeros(groups, dtype=torch.int32, device=device)
        self.index = torch.arange(max(num_rows, self.max_num_reqs, self.num_speculative_steps), device=device)
        # x_1 and its position among the drafts, in the dtype that vLLM's kernels load them with
        self.input_tokens, self.local_pos = torch.zeros(2, self.max_num_reqs, dtype=torch.int32, device=device)
        starts = torch.arange(groups + 1, dtype=torch.int32, device=device)
        self.pass_starts = {1 + sizes[0]: starts * (1 + sizes[0]) for sizes in set(self.plan.sizes)}
        self.graphs: DraftGraphs  # set by `init_cudagraph_manager`
        self.late_graphs: DraftGraphs | None = None
        self.sampler: Any = None  # vLLM's, set before the first step
        self.merged_output: Any = None  # of a merged pass

    def max_pass_rows(self) -> int:
        return self.plan.max_rows

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        head = load_ptp(self.speculative_config.model_folder, self.dtype, self.device)
        self.target = target_model
        self.layers, self.late = head.layers, head.layers.late
        self.set_sampler(CoupledRejectionSampler, target_model, "sampler")
        scale = self.head.lora_alpha / self.head.lora_rank
        student = build_student(target_model, head.lora, scale, self.gate, self.writes)
        student.kept = kept(self.layers.parameters())
        # outputs of captured passes: the logits of x_1's row, and the states that the late network reads
        captured = self.vllm_config.compilation_config.max_cudagraph_capture_size or 0
        logits = target_model.compute_logits(self.embeds[:1])
        self.first_logits = logits.new_zeros(min(self.max_num_reqs, captured), logits.shape[-1])
        self.graph_states = torch.zeros_like(self.embeds[: self.plan.max_rows if self.late is not None else 0])
        return student

    def set_attn(self, model_state: Any, kv_cache_config: KVCacheConfig, block_tables: BlockTables, *args: Any) -> None:
        super().set_attn(model_state, kv_cache_config, block_tables, *args)
        plan, config = self.plan, self.vllm_config
        # metadata builders of the student's passes get more sequences than the engine has
        scheduler = replace_attributes(config.scheduler_config, max_num_seqs=self.max_num_reqs + plan.max_groups)
        config = replace_attributes(config, scheduler_config=scheduler)
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
        aux_rows = [0, *(sizes[0] for sizes in self.plan.sizes)]

        def fits(num_reqs: int, num_aux: int) -> bool:
            return num_reqs <= len(self.group_ends) and num_reqs * (1 + num_aux) <= len(self.embeds)

        self.graphs = DraftGraphs(self.vllm_config, self.device, mode, aux_rows, fits)
        if self.late is not None:
            late_rows = [rows if self._count_drafts(rows) > 1 else 0 for rows in aux_rows]
            self.late_graphs = DraftGraphs(self.vllm_config, self.device, mode, late_rows, fits)

    def capture(self) -> None:
        super().capture()
        if self.late_graphs is not None and self.late_graphs.needs_capture():
            self.late_graphs.capture_drafts(self._prepare_late_capture)

    def _prepare_capture(self, num_reqs: int, num_aux: int) -> Callable[[], None]:
        self.idx_mapping.fill_(-1)
        self._fill_pass(num_reqs, num_aux)
        self._build_pass_metadata(num_aux, torch.full((num_reqs,), self.max_model_len, dtype=torch.int32))
        for metadata in (self.metadata or {}).values():
            if getattr(metadata, "max_num_splits", None) == 0:
                metadata.max_num_splits = 1  # FlashAttention 3: 0 chooses on the host, by the lengths of a capture

        def run() -> None:
            self._fill_pass(num_reqs, num_aux)
            hidden, self.first_logits[:num_reqs] = self._run_draft_pass(num_reqs, num_aux)
            if self.late is not None:
                self.graph_states[: num_reqs * (1 + num_aux)] = hidden.flatten(0, 1)

        return run

    def _prepare_late_capture(self, num_reqs: int, num_aux: int) -> Callable[[], None]:
        self.idx_mapping.fill_(-1)
        return partial(self._draft_late, self.graph_states[: num_reqs * (1 + num_aux)].view(num_reqs, 1 + num_aux, -1))

    def _draft_step(
        self, input_batch: InputBatch, states: Tensor, num_sampled: Tensor, num_drafts: int, dummy_run: bool
    ) -> None:
        if not dummy_run:
            self._generate_draft(input_batch, num_sampled, self.draft_tokens[: input_batch.num_reqs])

    def _generate_draft(self, input_batch: InputBatch, num_sampled: Tensor, drafts: Tensor) -> None:
        """Fill drafts [R, K], part of `draft_tokens`; zeros where there are no rows."""
        num_reqs = input_batch.num_reqs
        num_aux = self.plan.sizes[num_reqs - 1][0]
        if (count := self._count_drafts(num_aux)) < self.num_speculative_steps:
            drafts[:, count:] = 0
        if not num_aux:
            return
        graph = self.graphs.find(num_reqs, num_aux)
        if graph is None:
            self._fill_pass(num_reqs, num_aux)
            self._build_pass_metadata(num_aux, input_batch.seq_lens_cpu_upper_bound[:num_reqs] + num_aux + 2)
            hidden, logits = self._run_draft_pass(num_reqs, num_aux)
        else:
            self.graphs.run_fullgraph(graph)
            hidden, logits = None, self.first_logits
        drafts[:, 0] = self._sample_first_draft(logits[:num_reqs], input_batch)
        if self.late_graphs is not None and (late := graph and self.late_graphs.find(num_reqs, num_aux)):
            self.late_graphs.run_fullgraph(late)
        elif hidden is not None:
            self._draft_late(hidden)

    def _count_drafts(self, num_aux: int) -> int:
        """Return the drafts of a request with a pass over num_aux auxiliary rows; 0 rows: no pass."""
        return min(self.num_speculative_steps, num_aux + 1 - self.lead) if num_aux else 0

    def _fill_pass(self, num_reqs: int, num_aux: int) -> None:
        """Fill the buffers of the pass [x_1 | u_2 ..] over R requests from those of `gather_inputs`."""
        width = 1 + num_aux
        slots, tokens = self.idx_mapping[:num_reqs], self.input_tokens[:num_reqs]
        prefix = torch.where(slots >= 0, self.first_pos[:num_reqs], 0)
        offset = self.index[:width]
        self._fill_groups(0, prefix[:, None], slots, torch.zeros_like(offset), offset)
        tokens.copy_(self.first_tokens[:num_reqs])
        leading = slice(0, num_reqs * width, width)
        self.embeds[leading] = self.target.embed_input_ids(tokens)
        self.row_positions[leading] = prefix.clamp(max=self.max_model_len - 1)
        self.group_ends[:num_reqs] = prefix + width

    def _fill_groups(self, first_row: int, prefix: Tensor, slots: Tensor, group: Tensor, offset: Tensor) -> Tensor:
        """Fill the rows of a pass from `first_row` on with groups of rows that carry u; return their block tables.

        Args:
            prefix: [R, G], tokens of its text that each of G groups of R requests reads.
            slots: [R], request slots. A padding request (-1) writes to no slot.
            group, offset: [B], group and index in it of each row of a request.
        """
        num_reqs, num_groups = prefix.shape
        rows = slice(first_row, first_row + num_reqs * len(group))
        row_prefix = prefix[:, group]  # [R, B]
        at = row_prefix + offset  # index of each row in its text, and of the token whose u it carries
        self.embeds[rows] = self._embed_u(at - 1, slots).flatten(0, 1)
        self.row_positions[rows] = (at - self.lead).flatten().clamp(max=self.max_model_len - 1)
        tables = self.block_tables.input_block_tables[0][:num_reqs].repeat_interleave(num_groups, dim=0)
        tables, self.writes.source, self.writes.target = self.group_blocks.fill_tables(prefix.flatten(), tables)
        number = self.index[:num_reqs, None] * num_groups + group
        own = self.group_blocks.slots(number, row_prefix, at)
        self.row_slots[0, rows] = torch.where(slots[:, None] >= 0, own, PAD_SLOT_ID).flatten()
        return tables

    def _build_pass_metadata(self, num_aux: int, upper: Tensor) -> None:
        """Set the attention metadata of the filled pass, which has parts of buffers alone, as CUDA graphs need it.

        upper: [R], on the host, bounds on the tokens that each request attends to.
        """
        num_reqs, width = len(upper), 1 + num_aux
        self.gate.choose(0, num_reqs, width, lead=1)
        self._build_metadata(
            self.aux_groups,
            num_reqs * width,
            upper,
            query_start_loc_gpu=self.pass_starts[width][: num_reqs + 1],
            query_start_loc_cpu=torch.arange(num_reqs + 1, dtype=torch.int32) * width,
            max_query_len=width,
            seq_lens=self.group_ends[:num_reqs],
            block_tables=[self.group_blocks.tables[:num_reqs]],
            is_prefilling=torch.zeros(num_reqs, dtype=torch.bool),
        )

    def _run_draft_pass(self, num_reqs: int, num_aux: int) -> tuple[Tensor, Tensor]:
        """Run the filled pass; fill the drafts after the first, unless they depend on it.

        Returns:
            States [R, 1 + A, D], and the logits [R, V] of the rows of x_1.
        """
        hidden = self._run_model(num_reqs * (1 + num_aux)).view(num_reqs, 1 + num_aux, -1)
        if self.late is not None:
            return hidden, self.target.compute_logits(hidden[:, 0])
        count = self._count_drafts(num_aux)
        rows = torch.cat([hidden[:, :1], hidden[:, 1 + self.lead : self.lead + count]], dim=1)  # [R, count, D]
        logits = self.target.compute_logits(rows.flatten(0, 1))  # one product for all
        keys = self.first_pos[:num_reqs, None] + self.index[:count]
        slots = self.idx_mapping[:num_reqs, None].expand_as(keys).flatten()
        self.draft_tokens[:num_reqs, :count] = self._select_drafts(logits, keys.flatten(), slots).view_as(keys)
        return hidden, logits[::count]

    def _draft_late(self, hidden: Tensor) -> None:
        """Fill the drafts after the first by the late network, from states [R, 1 + A, D] of the pass."""
        num_reqs, width, _ = hidden.shape
        if self.late is not None and (count := self._count_drafts(width - 1)) > 1:
            rows = hidden[:, 1 + self.lead : self.lead + count]
            keys = self.first_pos[:num_reqs, None] + self.index[1:count]
            drafts, slots = self.draft_tokens[:num_reqs], self.idx_mapping[:num_reqs]
            drafts[:, 1:count] = self._draft_rows(rows, drafts[:, 0], keys, slots)

    def _run_model(self, num_rows: int) -> Tensor:
        forward = partial(self.model, input_ids=None, inputs_embeds=self.embeds[:num_rows])
        return self._run_pass(num_rows, lambda positions: forward(positions=positions))

    def _warm_up(self) -> None:
        self.metadata, self.writes.source = None, None
        self.gate.choose(0, 1, self.plan.max_rows)
        hidden = self._run_model(len(self.embeds))
        drafting = [(batch, sizes[0]) for batch, sizes in enumerate(self.plan.sizes, start=1) if any(sizes)]
        drafted = max((batch * (1 if self.late else self._count_drafts(rows)) for batch, rows in drafting), default=0)
        slots = torch.zeros(drafted, dtype=torch.int64, device=self.device)
        logits = self.target.compute_logits(hidden.new_zeros(drafted, hidden.shape[1]))
        self._select_drafts(logits, slots, slots)
        verified = self.target.compute_logits(hidden[:1])
        for first in (verified, self.first_logits[:1]):  # of verified rows and of x_1; float32 once processed
            for given in (first, torch.empty_like(first, dtype=torch.float32)) if len(first) else ():
                for dtype in (torch.int32, torch.int64):
                    select_tokens(given, slots[:1].to(dtype), slots[:1], self.seeds, self.temperature)

    def _draw_inputs(self) -> tuple[Tensor, Tensor]:
        """Return seeds and temperatures by slot, where graphs read them."""
        return self.seeds, self.temperature

    def _embed_u(self, keys: Tensor, slots: Tensor) -> Tensor:
        if not self.head.informed:
            return self.layers(torch.full_like(keys, UNUSED_U, dtype=torch.float))
        requests = slots.clamp(min=0)[:, None].expand_as(keys).flatten()
        return self.layers(u_of(*self._draw_inputs(), requests, keys.flatten()).view_as(keys))

    def _sample_first_draft(self, logits: Tensor, input_batch: InputBatch) -> Tensor:
        """Return x_2 [R] as verification will pick it unless a grammar forbids it; logits [R, V] of the row of x_1."""
        num_reqs = input_batch.num_reqs
        slots, prefix = input_batch.idx_mapping[:num_reqs], self.first_pos[:num_reqs]
        tokens, local_pos = self.input_tokens[:num_reqs], self.local_pos[:num_reqs]
        rows = slots, slots, input_batch.idx_mapping_np[:num_reqs], prefix, tokens, local_pos
        upper = input_batch.seq_lens_cpu_upper_bound.numpy()[:num_reqs] + 1
        processed = self.sampler.apply_sampling_params(logits, *rows, upper)
        states = self.sampler.sampling_states
        return select_tokens(processed, slots, prefix, states.seeds.gpu, states.temperature.gpu)

    def _select_drafts(self, logits: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
        """Return drafts [T] from logits [T, V], which include the temperature, in request slots [T].

        keys: [T], the position before each draft.
        """
        if not self.head.picks:
            return logits.argmax(dim=-1)
        return select_tokens(logits, slots.clamp(min=0), keys, *self._draw_inputs(), self.head.distribution_trust)

    def _draft_rows(self, hidden: Tensor, first: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
        """Return drafts [R, k] of rows with states [R, k, D] after the tokens `first` [R]; keys [R, k], slots [R]."""
        compute_logits = self.target.compute_logits
        if self.late is None:
            requests = slots[:, None].expand_as(keys).flatten()
            return self._select_drafts(compute_logits(hidden.flatten(0, 1)), keys.flatten(), requests).view_as(keys)

        def choose(state: Tensor, k: int) -> Tensor:
            return self._select_drafts(compute_logits(state), keys[:, k], slots)

        return self.late.draft(hidden, first, self.target.embed_input_ids, choose)
