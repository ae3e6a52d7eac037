"""PTP drafts in two passes on vLLM's Model Runner V2 (Parallel Token Prediction, section 2.3 and appendix H.1).

Algorithm (per request, after every target pass): the target has chosen the token x_1. One pass of the student reads

    [ x_1 | u_2 u_3 .. ]        x_1 as the target reads it, then uniform numbers in place of tokens, with the LoRA

behind the request's committed tokens. x_1's own row gives the target's distribution of x_2, from which u_2 picks: the
first draft is what the verifier will pick. The others come from the auxiliary rows
(`vllm_mtpc.heads.ptp.distribution`): o-ptp the argmax of the row that carries their own u, c-ptp by their u from the
row before. The verifier picks with the same u, a hash of (seed, position) made again by both (`verification.py`): a
draft is accepted where the student is right.

Differences from DraftModelSpeculator:
  * The draft model is the target: same weights, same attention layers, same KV cache, whose committed tokens it reads.
  * What it writes goes to blocks set aside for it (`groups.py`), never to a request's, so no lookahead slots exist.
  * Slots and positions are apart: an auxiliary row sits where the token would sit that predicts the same token.
  * No `draft_logits`: verification compares tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer, init_attn_backend
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_mtpc.checkpoint.ptp_head import load_ptp
from vllm_mtpc.heads.ptp.distribution import draft_tokens, reads_u
from vllm_mtpc.heads.ptp.embedding import lookup
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.proposers.config.switches import logger
from vllm_mtpc.proposers.heads.load import kept
from vllm_mtpc.proposers.heads.swap import copy_tensors
from vllm_mtpc.proposers.v2.graphs import DraftGraphs
from vllm_mtpc.proposers.v2.lora import Gate, retaken
from vllm_mtpc.proposers.v2.ptp.groups import Scratch
from vllm_mtpc.proposers.v2.ptp.tree import Writes, check_attention, student_tree
from vllm_mtpc.proposers.v2.shared_modules import changed, eager_priorities
from vllm_mtpc.proposers.v2.verification import CoupledRejectionSampler, u_of, with_verifier

# Attention backends whose metadata is where its tensors are: others plan each pass on the host.
CAPTURED = ("FLASH_ATTN", "TRITON_ATTN")
UNINFORMED = 0.5  # on every row, for a head that was trained without u


@dataclass
class RowBatch:
    """R requests; S are the slots of vLLM's states. What sampling tells (None: it is still to come) is for drafts."""

    input_batch: InputBatch
    temperature: Tensor  # [S]
    seeds: Tensor  # [S]
    num_sampled: Any = None  # Tensor [R], 0: the prompt is not read to its end
    num_rejected: Any = None  # Tensor [R]
    last_sampled: Any = None  # Tensor [S, 1]
    next_prefill_tokens: Any = None  # Tensor [lookahead, S]

    @cached_property
    def num_reqs(self) -> int:
        return self.input_batch.num_reqs

    @cached_property
    def slots(self) -> Tensor:
        """[R]"""
        return self.input_batch.idx_mapping[: self.num_reqs]

    @cached_property
    def prefix(self) -> Tensor:
        """Committed tokens [R] of each request, x_1 not among them."""
        ends = self.input_batch.query_start_loc[1 : self.num_reqs + 1]
        return self.input_batch.positions[(ends - self.num_rejected[: self.num_reqs] - 1).long()] + 1

    @cached_property
    def first(self) -> Tensor:
        """x_1 [R]; of requests whose prompt is not read to its end, the next token of it."""
        is_sampled = self.num_sampled[: self.num_reqs] > 0
        return torch.where(is_sampled, self.last_sampled[self.slots, 0], self.next_prefill_tokens[0, self.slots].long())

    @cached_property
    def is_greedy(self) -> Tensor:
        """[R]"""
        return self.temperature[self.slots] == 0

    def u(self, keys: Tensor) -> Tensor:
        """u [R, A] of the tokens that follow positions keys[R, A]."""
        requests = self.slots[:, None].expand_as(keys).flatten()
        return u_of(self.seeds, self.temperature, requests, keys.flatten()).view_as(keys)


class PtpSpeculator(DraftModelSpeculator):
    keeps_shapes = True  # of a head that takes another one's place

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        spec = self.speculative_config
        self.head, self.plan = spec.head, spec.plan(self.max_num_reqs)
        self.lead = self.head.first_row  # rows of a group that draft nothing
        self.gate, self.writes = Gate(), Writes()
        rows, groups = self.num_rows(), self.plan.max_groups
        self.embeds = torch.zeros(rows, self.hidden_size, dtype=self.dtype, device=device)
        self.states = torch.zeros_like(self.embeds[: self.plan.max_rows])  # that a captured pass leaves
        self.row_positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.row_slots = torch.full((rows,), PAD_SLOT_ID, dtype=torch.int64, device=device)
        self.group_ends = torch.zeros(groups, dtype=torch.int32, device=device)
        self.row_index = torch.arange(rows, device=device)
        self.group_index = torch.arange(groups, device=device)
        self.draft_index = torch.arange(self.num_speculative_steps, device=device)
        self.copied = torch.zeros(groups, dtype=torch.int64, device=device)  # block that each group starts in
        self.pass_rows: dict[int, tuple[Tensor, Tensor]] = {}  # by auxiliary rows: where requests and such rows stand
        self.graphs: DraftGraphs  # `init_cudagraph_manager` makes it
        self.metadata: dict[str, Any] | None = None  # of the pass under way
        self.sampler: Any = None
        self.drafted: Any = None  # what a merged pass has left
        self.priorities = eager_priorities(vllm_config)

    def num_rows(self) -> int:
        """The most rows of a pass of the student."""
        return self.plan.max_rows

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        head = load_ptp(self.speculative_config.model_folder, self.dtype, self.device)
        scale = self.head.lora_alpha / self.head.lora_rank
        self.target = target_model
        self.embedding, self.late = head.embedding, head.late
        self.table = head.embedding.table() if self.speculative_config.u_table else None
        base = resolve_model_state_cls(self.vllm_config, target_model)
        on_sampler = partial(setattr, self, "sampler")
        state = with_verifier(CoupledRejectionSampler, base, self.speculative_config, self.device, on_sampler)
        target_model.get_model_state_cls = lambda: state
        student = student_tree(target_model, head.lora, scale, self.gate, self.writes)
        parts = [part for module in (self.embedding, self.late) if module is not None for part in module.parameters()]
        student.kept = kept(parts if self.table is None else [*parts, self.table])
        return student

    @torch.inference_mode()
    def prepared(self, made: Any, target_model: nn.Module) -> Callable[[], None]:
        """Reads the head of another configuration; returns what puts it in force (heads/swap.py)."""
        head = load_ptp(made.model_folder, self.dtype, self.device)
        take = retaken(self.model, head.lora, made.head.lora_alpha / made.head.lora_rank, target_model)
        table = None if self.table is None else head.embedding.table()

        def commit() -> None:
            take()
            copy_tensors(self.embedding, head.embedding)
            if self.late is not None:
                copy_tensors(self.late, head.late)
            if self.table is not None:
                self.table.copy_(table)

        return commit

    def set_attn(self, model_state: Any, kv_cache_config: KVCacheConfig, block_tables: BlockTables, *args: Any) -> None:
        super().set_attn(model_state, kv_cache_config, block_tables, *args)
        plan, config = self.plan, self.vllm_config
        # What the metadata builders of our passes see: more sequences than the engine has, and no graphs.
        scheduler = changed(config.scheduler_config, max_num_seqs=self.max_num_reqs + plan.max_groups)
        compilation = changed(config.compilation_config, cudagraph_mode=CUDAGraphMode.NONE)
        config = changed(config, scheduler_config=scheduler, compilation_config=compilation)
        self.aux_groups, _, _ = init_attn_backend(kv_cache_config, config, self.device)
        check_attention(kv_cache_config, self.aux_groups)
        block_size = block_tables.block_sizes[0]
        reserved = plan.num_blocks(block_size)
        # the cache's last blocks; vLLM's profiling cache has fewer, and what is written there is not used
        own = (torch.arange(reserved, device=self.device) + kv_cache_config.num_blocks - reserved).clamp_(min=0)
        own = own.view(plan.max_groups, plan.blocks_per_group(block_size))
        self.scratch = Scratch(own, block_size, block_tables.input_block_tables[0].shape[1])

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        mode, others = cudagraph_mode, {group.backend.get_name() for group in self.aux_groups[0]} - {*CAPTURED}
        if others and mode.decode_mode() == CUDAGraphMode.FULL:
            logger.warning(
                "method 'ptp': attention backend %s plans each pass on the host, so drafts run without CUDA graphs; "
                "allowed with graphs: %s; add --attention-backend FLASH_ATTN",
                ", ".join(sorted(others)),
                ", ".join(CAPTURED),
            )
            mode = CUDAGraphMode.NONE
        for group in self.aux_groups[0] if mode.decode_mode() == CUDAGraphMode.FULL else ():
            # FlashAttention 3: no schedule made ahead for each step, where a captured pass would not look
            group.get_metadata_builder(0).aot_schedule = False
        buckets = [self.plan.bucket(batch) for batch in range(1, self.max_num_reqs + 1)]
        rows = [0, *(bucket.sizes[0] if bucket else 0 for bucket in buckets)]

        def fits(num_reqs: int, size: int) -> bool:
            return num_reqs <= len(self.copied) and num_reqs * (1 + size) <= len(self.embeds)

        self.graphs = DraftGraphs(self.vllm_config, self.device, mode, rows, fits)

    def capture(self) -> None:
        def prepare(num_reqs: int, size: int) -> Callable[[], None]:
            self._pad(0, num_reqs, 1 + size)
            self._set_pass(size, torch.full((num_reqs,), self.max_model_len, dtype=torch.int32))
            return partial(run, num_reqs * (1 + size))

        def run(num_rows: int) -> None:
            self.states[:num_rows] = self._forward(num_rows)

        if self.graphs.needs_capture():
            self.graphs.capture_drafts(prepare)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,  # [num_tokens, D]
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        *args: Any,
        dummy_run: bool = False,
        is_profile: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Drafts [R, K], int64; zeros where the batch is too large to draft for, and behind the last real draft."""
        drafts = self.draft_tokens[: input_batch.num_reqs].zero_()
        if is_profile:
            self._fill_memory()
        if dummy_run:
            self.drafted = None
        else:
            states = temperature, seeds, num_sampled, num_rejected, last_sampled, next_prefill_tokens
            self._draft(RowBatch(input_batch, *states), drafts)
        return drafts

    def _draft(self, batch: RowBatch, drafts: Tensor) -> None:
        """Fills drafts [R, K], which are zeros."""
        bucket = self.plan.bucket(batch.num_reqs)
        if bucket is None:
            return
        size = bucket.sizes[0]
        hidden = self._draft_pass(batch, size)  # [R, 1 + A, D]
        count = min(self.num_speculative_steps, size + 1 - self.lead)
        skip = 1 + self.lead
        keys = batch.prefix[:, None] + self.draft_index[1:count]
        rows = hidden[:, skip : skip + count - 1]  # [R, count - 1, D]
        if self.late is not None:
            drafts[:, 0] = self._first_draft(self.target.compute_logits(hidden[:, 0]), batch)
            if count > 1:
                drafts[:, 1:count], _ = self._chain(rows, drafts[:, 0], keys, batch)
            return
        logits = self._logits(torch.cat([hidden[:, :1], rows], dim=1))  # one product for all
        drafts[:, 0] = self._first_draft(logits[:, 0], batch)
        if count > 1:
            drafts[:, 1:count] = self._pick(logits[:, 1:], keys, batch)

    def _logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [R, k, V] of states [R, k, D]."""
        return self.target.compute_logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def _draft_pass(self, batch: RowBatch, size: int) -> Tensor:
        """States [R, 1 + size, D] of [x_1 | u ..] behind each request's prefix."""
        num_reqs, prefix, width = batch.num_reqs, batch.prefix, 1 + size
        rows = num_reqs * width
        at = prefix[:, None] + self.row_index[:width]  # [R, 1 + size]: slots follow each other
        keys = at[:, :size]  # an auxiliary row carries the u of the token at its slot
        embeds = self.embeds[:rows].view(num_reqs, width, -1)
        embeds[:, 0] = self.target.embed_input_ids(batch.first)
        embeds[:, 1:] = self._embed(keys, batch)
        positions = self.row_positions[:rows].view(num_reqs, width)
        positions[:, 0] = prefix
        positions[:, 1:] = keys if self.lead else at[:, 1:]
        positions.clamp_(max=self.max_model_len - 1)

        _, self.copied[:num_reqs], _ = self.scratch.attach(prefix, self.block_tables.input_block_tables[0][:num_reqs])
        group = self.group_index[:num_reqs, None].expand(-1, width)
        self.row_slots[:rows] = self.scratch.slots(group, prefix[:, None], at).flatten()
        self.group_ends[:num_reqs] = prefix + width
        upper = batch.input_batch.seq_lens_cpu_upper_bound[:num_reqs] + width + 1
        graph = self.graphs.find(num_reqs, size)
        if graph is None:
            self._set_pass(size, upper)
            return self._forward(rows).view(num_reqs, width, -1)
        self._pad(num_reqs, graph.num_reqs, width)
        self._set_pass(size, torch.cat([upper, upper.new_full((graph.num_reqs - num_reqs,), width)]))
        self.graphs.run_fullgraph(graph)
        return self.states[:rows].view(num_reqs, width, -1)

    def _pad(self, num_reqs: int, padded: int, width: int) -> None:
        """Rows of requests num_reqs .. padded - 1: they read their own rows, and write to no slot."""
        self.row_slots[num_reqs * width : padded * width] = PAD_SLOT_ID
        self.group_ends[num_reqs:padded] = width
        self.copied[num_reqs:padded] = 0

    def _set_pass(self, size: int, upper: Tensor) -> None:
        """What the pass over [x_1 | u ..] of R requests reads next to its rows: parts of buffers, as graphs want it.

        upper [R], on the host: bounds on the tokens that they see.
        """
        num_reqs, width = len(upper), 1 + size
        if size not in self.pass_rows:  # made once and kept: a graph reads them where they are
            starts = torch.arange(len(self.copied) + 1, device=self.device) * width
            aux_rows = (starts[:-1, None] + torch.arange(1, width, device=self.device)).flatten()
            self.pass_rows[size] = starts.int(), aux_rows
        starts, aux_rows = self.pass_rows[size]
        self.gate.rows = aux_rows[: num_reqs * size]
        writes = self.writes
        writes.num_real, writes.source, writes.target = 0, self.copied[:num_reqs], self.scratch.own[:num_reqs, 0]
        self._set_metadata(
            num_reqs * width,
            upper,
            query_start_loc_gpu=starts[: num_reqs + 1],
            query_start_loc_cpu=torch.arange(num_reqs + 1, dtype=torch.int32) * width,
            max_query_len=width,
            seq_lens=self.group_ends[:num_reqs],
            block_tables=[self.scratch.tables[:num_reqs]],
            is_prefilling=torch.zeros(num_reqs, dtype=torch.bool),
        )

    def _fill_memory(self) -> None:
        """What the largest pass allocates besides buffers, while vLLM measures how much is left for the KV cache."""
        # rows of drafts, and those of the target where they share a pass
        self.metadata, self.writes.source, self.gate.rows = None, None, self.row_index[: self.plan.max_rows]
        hidden = self._forward(len(self.embeds))
        drafted = max((bucket.max_batch for bucket in self.plan.buckets), default=0) * self.num_speculative_steps
        logits = self.target.compute_logits(hidden.new_zeros(drafted, hidden.shape[1]))
        if reads_u(self.head):
            draft_tokens(self.head, logits, torch.zeros(drafted, device=self.device))

    def _embed(self, keys: Tensor, batch: RowBatch) -> Tensor:
        """Embeddings [R, A, D] of the u keyed by keys[R, A]."""
        u = batch.u(keys) if self.head.informed else torch.full_like(keys, UNINFORMED, dtype=torch.float32)
        return self.embedding(u) if self.table is None else lookup(self.table, u)

    def _chain(self, hidden: Tensor, first: Tensor, keys: Tensor, batch: RowBatch) -> tuple[Tensor, Tensor]:
        """Drafts [R, k] and their logits [R, k, V] by the late network, behind the token first[R].

        hidden [R, k, D] of their rows; keys [R, k]: position before each draft.
        """
        logits: list[Tensor] = []

        def choose(state: Tensor, k: int) -> Tensor:
            logits.append(self.target.compute_logits(state))
            return self._pick(logits[-1][:, None], keys[:, k : k + 1], batch)[:, 0]

        assert self.late is not None  # `_draft` asks
        drafts = self.late.draft(hidden, first, self.target.embed_input_ids, choose)
        return drafts, torch.stack(logits, dim=1)

    def _set_metadata(self, num_rows: int, upper: Tensor, **given: Any) -> None:
        """What attention reads in a pass over the first rows of the buffers, as S sequences.

        upper [S], on the host: bounds on the tokens that each sees at its end; given: the rest by vLLM's names.
        """
        self.metadata = build_attn_metadata(
            attn_groups=self.aux_groups,
            num_reqs=len(upper),
            num_tokens=num_rows,
            max_seq_len=int(upper.max()),
            slot_mappings=self.row_slots[None, :num_rows],
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=upper,
            positions=self.row_positions[:num_rows],
            **given,
        )

    def _forward(self, num_rows: int) -> Tensor:
        """States [T, D] of that pass; without metadata nothing is read or written of the KV cache."""
        slots = self.row_slots[None, :num_rows]  # one KV cache group
        slots = {} if self.metadata is None else build_slot_mappings_by_layer(slots, self.kv_cache_config)
        context = set_forward_context(
            self.metadata,
            self.vllm_config,
            num_tokens=num_rows,
            slot_mapping=slots,
            batch_descriptor=BatchDescriptor(num_tokens=num_rows),
            skip_compiled=True,
        )
        with context, self.priorities.set_priority():
            positions, embeds = self.row_positions[:num_rows], self.embeds[:num_rows]
            return self.model(input_ids=None, positions=positions, inputs_embeds=embeds)

    def _first_draft(self, logits: Tensor, batch: RowBatch) -> Tensor:
        """x_2 [R] as the verifier will pick it, where no grammar says otherwise; logits [R, V] of x_1's own row."""
        num_reqs, slots, prefix = batch.num_reqs, batch.slots, batch.prefix
        processed = self.sampler.apply_sampling_params(
            logits,
            slots,
            slots,
            batch.input_batch.idx_mapping_np[:num_reqs],
            prefix,
            batch.first,
            torch.zeros(num_reqs, dtype=torch.int32, device=self.device),
            batch.input_batch.seq_lens_cpu_upper_bound.numpy()[:num_reqs] + 1,
        )
        picked = pick(processed.float(), batch.u(prefix[:, None])[:, 0])
        return torch.where(batch.is_greedy, logits.argmax(dim=-1), picked)

    def _pick(self, logits: Tensor, keys: Tensor, batch: RowBatch) -> Tensor:
        """Drafts [R, k] from the student's logits [R, k, V]; keys [R, k]: position before each draft.

        The student learnt the distribution that the target's parameters make, so no temperature is applied here.
        """
        best = logits.argmax(dim=-1)
        if not reads_u(self.head):
            return best
        picked = draft_tokens(self.head, logits.flatten(0, 1), batch.u(keys).flatten()).view_as(best)
        return torch.where(batch.is_greedy[:, None], best, picked)
