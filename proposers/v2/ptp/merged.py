"""PTP drafts in the target's own forward pass ("partial quadratic decoding"; Parallel Token Prediction, app. E).

Algorithm: while the target verifies [x, d_1 .. d_K] of a request, the same pass carries groups of auxiliary rows, one
for each number d of drafts that may be accepted:

    verified    x  d_1 .. d_K                  the target as it is
    group d     u_(c) u_(c+1) ..  c = d + 1    after x, d_1 .. d_d and the request's committed tokens

If a drafts are accepted, the states of group a give the next drafts: o-ptp takes the argmax of each row but the first
(which carries the u of the token that verification picks), c-ptp picks with the u of each row's successor. The other
groups are dropped; `vllm_mtpc/heads/ptp/row_groups.py` gives rows to the groups where drafts are likely to end.

The student's forward pass replaces the target's except for batches that are too large to draft for; `propose` only
reads its states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.proposers.v2.ptp.groups import Layout
from vllm_mtpc.proposers.v2.ptp.ptp_speculator import PtpSpeculator


class MergedOutput(NamedTuple):
    """What `propose` reads of a merged pass."""

    hidden: Tensor  # [R * B, D], states of the auxiliary rows
    layout: Layout
    position: Tensor  # [R], of x, the last committed token


class MergedSpeculator(PtpSpeculator):
    """PTP drafts from groups of rows in the target's own pass."""

    next_drafts = 0  # of each request after this step; without any the step carries no groups

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        sequences = self.max_num_reqs + self.plan.max_groups
        self.sequence_ends = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.starts = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        self.layouts = {sizes: Layout.create(sizes, device) for sizes in set(self.plan.sizes) if any(sizes)}
        self.step_batch: InputBatch | None = None

    def max_pass_rows(self) -> int:
        return self.max_num_tokens + self.plan.max_rows

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        student = super().load_draft_model(target_model, target_attn_layer_names)
        speculator = self
        base: Any = target_model.get_model_state_cls()

        class ModelStateWithStep(base):
            def preprocess_state(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> None:
                speculator.step_batch = input_batch
                super().preprocess_state(input_batch, *args, **kwargs)

        target_model.get_model_state_cls = lambda: ModelStateWithStep
        self.target_forward = target_model.forward
        target_model.forward = self.forward  # after the copy: the student's forward is the model's own
        return student

    def _draw_inputs(self) -> tuple[Tensor, Tensor]:
        states = self.sampler.sampling_states  # of this step: the pass runs before `propose`
        return states.seeds.gpu, states.temperature.gpu

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        width = self.group_blocks.tables.shape[1]
        self.sequence_tables = torch.zeros(len(self.sequence_ends), width, dtype=torch.int32, device=self.device)
        for group in self.aux_groups[0]:
            builder = group.get_metadata_builder(0)
            if getattr(builder, "reorder_batch_threshold", None) is not None:
                reason = f"attention backend {group.backend.get_name()} sorts a batch by length, unlike groups of rows"
                remedy = 'add --attention-backend FLASH_ATTN, or "draft_pass": "two-pass"'
                raise ServeConfigError(f"draft_pass 'merged': {reason}; {remedy}")

    @torch.inference_mode()
    def forward(self, input_ids: Tensor | None, positions: Tensor, **kwargs: Any) -> Tensor:
        """Run the target's forward pass with the groups; returns states [num_tokens_after_padding, D] of its rows."""
        step, self.step_batch, self.merged_output = self.step_batch, None, None
        layout = self.layouts.get(self.plan.sizes[step.num_reqs - 1]) if step is not None and self.next_drafts else None
        if step is None or layout is None:
            return self.target_forward(input_ids, positions, **kwargs)
        embeds = kwargs.get("inputs_embeds")
        embeds = self.target.embed_input_ids(input_ids) if embeds is None else embeds
        hidden = self._run_merged_pass(step, embeds, positions, layout)
        padding = positions.shape[-1] - step.num_tokens
        real = hidden[: step.num_tokens]
        return torch.cat([real, real.new_zeros(padding, real.shape[1])]) if padding else real

    def _run_merged_pass(self, step: InputBatch, embeds: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Return states of the target's rows, then of the groups' rows; keep the latter for `propose`."""
        num_reqs, num_real = step.num_reqs, step.num_tokens
        slots = step.idx_mapping[:num_reqs]
        first = step.logits_indices[step.cu_num_logits[:num_reqs].long()]  # [R], row of x
        position = step.positions[first]  # [R]
        drafted = (step.cu_num_logits[1 : num_reqs + 1] - step.cu_num_logits[:num_reqs] - 1).long()  # [R], drafts
        prefix = position[:, None] + 1 + torch.minimum(layout.accepted, drafted[:, None])  # [R, G]
        total, groups = num_real + num_reqs * layout.rows, len(layout.sizes_cpu)  # groups of a request

        self.embeds[:num_real] = embeds[:num_real]
        self.row_positions[:num_real] = positions[:num_real]
        self.row_slots[0, :num_real] = self.block_tables.slot_mappings[0, :num_real]
        self.writes.num_real, self.writes.real_slots = num_real, self.row_slots[0, :num_real]
        self.gate.choose(num_real, 1, total - num_real)
        group_tables = self._fill_groups(num_real, prefix, slots, layout.group, layout.offset)

        # sequences: those of the target, then the groups of each request
        tables, num_groups = self.block_tables.input_block_tables[0][:num_reqs], num_reqs * groups
        sequences = num_reqs + num_groups
        self.sequence_tables[:num_reqs, : tables.shape[1]] = tables
        self.sequence_tables[num_reqs:sequences] = group_tables
        self.sequence_ends[:num_reqs] = step.seq_lens[:num_reqs]
        self.sequence_ends[num_reqs:sequences] = (prefix + layout.sizes).flatten()
        starts = starts_cpu = self.starts[: sequences + 1]
        starts[: num_reqs + 1] = step.query_start_loc[: num_reqs + 1]
        starts[num_reqs + 1 :] = num_real + layout.sizes.repeat(num_reqs).cumsum(0)
        if self.device.type != "cpu":
            ends = num_real + layout.sizes_cpu.repeat(num_reqs).cumsum(0, dtype=torch.int32)
            starts_cpu = torch.cat([torch.from_numpy(step.query_start_loc_np[: num_reqs + 1]), ends])
        upper, is_prefilling = step.seq_lens_cpu_upper_bound[:num_reqs], torch.from_numpy(step.is_prefilling_np)
        self._build_metadata(
            self.aux_groups,
            total,
            torch.cat([upper, (upper + layout.longest).repeat_interleave(groups)]),
            query_start_loc_gpu=starts,
            query_start_loc_cpu=starts_cpu,
            max_query_len=max(int(step.num_scheduled_tokens.max()), layout.longest),
            seq_lens=self.sequence_ends[:sequences],
            block_tables=[self.sequence_tables[:sequences]],
            is_prefilling=torch.cat([is_prefilling, torch.zeros(num_groups, dtype=torch.bool)]),
        )
        hidden = self._run_model(total)
        self.merged_output = MergedOutput(hidden[num_real:], layout, position)
        return hidden

    def _count_drafts(self, num_aux: int) -> int:
        return self.num_speculative_steps  # columns of every batch

    def _generate_draft(self, input_batch: InputBatch, num_sampled: Tensor, drafts: Tensor) -> None:
        output, self.merged_output = self.merged_output, None
        if output is None:
            drafts.zero_()
            return
        layout, num_reqs = output.layout, input_batch.num_reqs
        slots = input_batch.idx_mapping[:num_reqs]
        accepted = (num_sampled[:num_reqs].long() - 1).clamp(min=0)  # [R]
        start, size = layout.find_group(accepted)  # [R]
        draft = self.index[: self.num_speculative_steps]
        row = draft + self.lead  # [K], within the group
        is_real = row < size[:, None]  # [R, K]
        index = self.index[:num_reqs, None] * layout.rows + (start[:, None] + row).clamp(max=layout.rows - 1)
        hidden = output.hidden[index]  # [R, K, D]
        keys = (output.position + 1 + accepted)[:, None] + draft
        tokens = self._draft_rows(hidden, self.first_tokens[:num_reqs], keys, slots)
        drafts.copy_(torch.where(is_real, tokens, 0))
