"""MtPC drafts on vLLM's Model Runner V2.

Algorithm, per request, after every target forward pass:
  1. gather the target's post-norm hidden state at the last accepted token, and x_1, the token that the target chose;
  2. compute from the hidden state the parameters of a circuit over the window of n tokens that starts with x_1;
  3. condition the circuit on x_1 and sample the drafts x_2 .. x_{K+1}, K < n, each from q(x_k | x_<k) (MtPC, eq. 7),
     with vLLM's Gumbel noise: of its drafting stream, or of the target's own for coupled requests (`verification.py`);
  4. store log q in `draft_logits`, which vLLM's rejection sampler scores the drafts with.

CUDA graphs hold steps 2 to 4 (`_generate_draft`). Only drafts of requests with a grammar wait for the host
(`grammar_masks.py`). `draft_logits` have the head's dtype, and drafts are sampled from the rounded numbers that are
scored. `draft_token_confidence_probs` depend on the conditionals, never on the sampled tokens: the output distribution
of draft lengths chosen by them is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.config.kernel import IrOpPriorityConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.platforms import current_platform
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_mtpc.heads.head import DraftParams, Head
from vllm_mtpc.kernels.draft.kernel import CircuitDrafter
from vllm_mtpc.plan.draft_schedule import expand_schedule
from vllm_mtpc.proposers.options.draft_memory import rows_at_once
from vllm_mtpc.proposers.v2.draft_graphs import DraftGraphs, replace_attributes
from vllm_mtpc.proposers.v2.gather import gather_inputs
from vllm_mtpc.proposers.v2.verification import DRAFTING, HeadSampler, needs_fresh_noise, step_seeds, with_sampler
from vllm_mtpc.proposers.worker.grammar_masks import Masks, StructuredRequests
from vllm_mtpc.proposers.worker.load import kept, load_served_head, weights_dtype


def eager_priorities(vllm_config: VllmConfig) -> IrOpPriorityConfig:
    """Return the providers of IR operations in eager code: the user's first, then vLLM's default without a compiler."""
    uncompiled_config = replace_attributes(vllm_config.compilation_config, mode=CompilationMode.NONE)
    config = replace_attributes(vllm_config, compilation_config=uncompiled_config)
    priorities = asdict(current_platform.get_default_ir_op_priority(config))
    for name, given in asdict(vllm_config.kernel_config.ir_op_priority).items():
        named = [provider for provider in given if provider != "native"]
        priorities[name] = list(dict.fromkeys([*named, *priorities[name]]))
    return IrOpPriorityConfig(**priorities)


class TargetPass(NamedTuple):
    """A forward pass of the target over T rows; metadata and KV slots by layer, None before there are KV caches."""

    batch: InputBatch
    attn_metadata: dict[str, Any] | None
    slot_mappings: dict[str, Tensor] | None
    states: Tensor  # [T, D], after the final norm
    aux_states: Any  # of selected layers, a list of [T, D], or None
    dp_sync_state: Any


class HeadSpeculator(DraftModelSpeculator):
    """The step of both methods, and forward passes over rows of their own.

    Attributes:
        last_rows, first_tokens, first_pos: [max_num_reqs], int64: the row of each request's last accepted token in the
            batch, the token x_1 after it, and the position of x_1 in its stream of noise: vLLM keys the noise of a
            token by the position before it.
        hidden_states: what drafts are made from; [max_num_reqs, D] of `last_rows` where `copies_states`.
        row_positions, row_slots: of own rows, [rows] and [KV cache groups, rows], int64.
        metadata: attention metadata of the rows' pass; None before there are KV caches.
    """

    copies_states: ClassVar[bool] = False
    row_positions: Tensor
    row_slots: Tensor

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.last_rows, self.first_tokens, self.first_pos, self.stream = torch.zeros(
            4, self.max_num_reqs, dtype=torch.int64, device=device
        )
        self.hidden_states = torch.zeros(0, dtype=self.dtype, device=device)
        ranges = self.speculative_config.num_speculative_tokens_per_batch_size
        self.drafts_by_batch = expand_schedule(ranges, self.max_num_reqs, self.num_speculative_steps)
        self.graphs: DraftGraphs | None = None
        self.metadata: dict[str, Any] | None = None
        self.priorities = eager_priorities(vllm_config)
        parallel = replace_attributes(vllm_config.parallel_config, data_parallel_size=1)  # no wait for other engines
        self.pass_config = replace_attributes(vllm_config, parallel_config=parallel)

    def set_sampler(self, kind: type[HeadSampler], target_model: nn.Module, attribute: str) -> None:
        """Verify with `kind`; this attribute of the speculator becomes the part of the sampler that drafts read."""
        base, on_ready = resolve_model_state_cls(self.vllm_config, target_model), partial(setattr, self, attribute)
        state = with_sampler(kind, base, self.speculative_config, self.device, on_ready)
        target_model.get_model_state_cls = lambda: state

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        *,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the drafts of R requests, [R, K], int64; columns from `num_speculative_tokens` on are stale.

        attn_metadata, slot_mappings: None before there are KV caches. num_sampled: 0 where a prompt is not read to its
        end. num_speculative_tokens: None in vLLM's dummy runs. BaseSpeculator has the shapes.
        """
        num_reqs = input_batch.num_reqs
        num_drafts = self.drafts_by_batch[num_reqs] if num_speculative_tokens is None else num_speculative_tokens
        done = (input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, dp_sync_state)
        states = self._read_states(TargetPass(*done))
        if is_profile:  # vLLM measures the memory that is left for the KV cache
            self._warm_up()
        elif num_drafts > 0:
            gather_inputs[(self.max_num_reqs,)](
                ends_ptr=input_batch.query_start_loc[1:], rejected_ptr=num_rejected, sampled_ptr=num_sampled,
                slot_ptr=input_batch.idx_mapping, positions_ptr=input_batch.positions, stream_ptr=self._stream(),
                last_sampled_ptr=last_sampled, last_sampled_stride=last_sampled.stride(0),
                next_prefill_ptr=next_prefill_tokens, next_prefill_stride=next_prefill_tokens.stride(1),
                temperature_ptr=temperature, seed_ptr=seeds, state_ptr=states, state_stride=states.stride(0),
                to_row_ptr=self.last_rows, to_first_ptr=self.first_tokens, to_pos_ptr=self.first_pos,
                to_slot_ptr=self.idx_mapping, to_temperature_ptr=self.temperature, to_seed_ptr=self.seeds,
                to_state_ptr=self.hidden_states, num_reqs=num_reqs, num_real=0 if dummy_run else num_reqs,
                width=states.shape[1], BLOCK=1024 if self.copies_states else 0,
            )  # fmt: skip
            self._draft_step(input_batch, states, num_sampled, num_drafts, dummy_run)
        if attn_metadata is not None:
            self._finish_step()
        return self.draft_tokens[:num_reqs]

    def capture(self) -> None:
        if self.graphs is not None and self.graphs.needs_capture():
            self.graphs.capture_drafts(self._prepare_capture)

    def drop_profiled_graphs(self) -> None:
        """Drop the graphs of vLLM's memory profile that it does not find among this speculator's attributes."""

    def _prepare_capture(self, num_reqs: int, num_drafts: int) -> Callable[[], None]:
        """Return the call that is captured for num_reqs requests with num_drafts drafts (PTP: auxiliary rows) each."""
        raise NotImplementedError

    def _read_states(self, done: TargetPass) -> Tensor:
        """Return the states [T, D] that drafts are made from; called in steps without drafts too."""
        return done.states

    def _stream(self) -> Tensor:
        """Return what is added to a request's position, [max_num_reqs], by slot, int64."""
        return self.stream

    def _warm_up(self) -> None:
        """Run the largest draft, whose memory vLLM measures."""

    def _draft_step(
        self, input_batch: InputBatch, states: Tensor, num_sampled: Tensor, num_drafts: int, dummy_run: bool
    ) -> None:
        """Fill `draft_tokens` [R, K] from states [T, D] and the gathered rows, tokens and positions."""

    def _finish_step(self) -> None: ...

    def _build_metadata(self, groups: list[list[Any]], num_rows: int, upper: Tensor, **given: Any) -> None:
        """Set the attention metadata of S sequences; upper: [S], on the host, bounds on their lengths."""
        self.metadata = build_attn_metadata(
            attn_groups=groups,
            num_reqs=len(upper),
            num_tokens=num_rows,
            max_seq_len=int(upper.max()),
            slot_mappings=self.row_slots[:, :num_rows],
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=upper,
            positions=self.row_positions[:num_rows],
            **given,
        )

    def _run_pass(self, num_rows: int, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Return forward(positions of the first rows) with the rows' attention metadata and KV slots."""
        slots = {}
        if self.metadata is not None:
            slots = build_slot_mappings_by_layer(self.row_slots[:, :num_rows], self.kv_cache_config)
        context = set_forward_context(
            self.metadata,
            self.pass_config,
            num_tokens=num_rows,
            slot_mapping=slots,
            batch_descriptor=BatchDescriptor(num_tokens=num_rows),
            skip_compiled=True,
        )
        with context, self.priorities.set_priority():
            return forward(self.row_positions[:num_rows])


class MtpcSpeculator(HeadSpeculator):
    """The drafts of a circuit head."""

    copies_states = True
    model: Head
    attends: ClassVar[bool] = False  # whether the draft's graph has attention, which some backends do not capture

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.use_acceptance_estimator = False
        self.needs_step_seeds = needs_fresh_noise(self.speculative_config)
        self.hidden_states = torch.zeros(self.max_num_reqs, self.hidden_size, dtype=self.dtype, device=device)
        self.is_drawn = self.draft_logits is not None  # else drafts are the argmax
        if self.speculative_config.verify == "coupled":  # no draft is scored
            self.draft_logits: Tensor | None = None
        self.states: Any = None  # CoupledStates; None: no request is coupled
        self.stream.fill_(DRAFTING)
        self.structured: StructuredRequests | None = None  # None: drafts are not masked with grammars

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        has_vocabulary = getattr(self.speculative_config.head, "draft_vocab_size", None)  # of circuit heads alone
        fill = -torch.inf if has_vocabulary else 0.0  # of ids outside, which are never written
        return weights_dtype(self.speculative_config.head_dtype, self.dtype), fill

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        head = self._load_head(target_model)
        logits_dtype = self.dtype if head.leaves.needs_lm_head else head.hidden_dtype
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or ()
        most, arms = self.num_speculative_steps, self.speculative_config.arms
        circuit, ids, noise = head.circuit, head.vocabulary and head.vocabulary.ids, gumbel_noised_argmax
        given = circuit.program, circuit.num_components, head.vocab_size, self.device, noise, self.use_fp64_gumbel
        self.drafter = CircuitDrafter(*given, ids=ids)
        in_blocks = not self.drafter.one_launch
        self.rows_at_once = rows_at_once(head, self.drafts_by_batch, most, logits_dtype, sizes, arms, in_blocks)
        head.kept = kept((*head.parameters(), self.drafter.program, *(head.vocabulary or ())))
        self.set_sampler(HeadSampler, target_model, "states")
        return head

    def _load_head(self, target_model: nn.Module) -> Head:
        return load_served_head(self.speculative_config, self.dtype, self.device, target_model, self.dtype)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        arms = self.speculative_config.arms
        if cudagraph_mode != CUDAGraphMode.NONE and not self.attends:  # whole, also where the target's are piecewise
            cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        self.graphs = DraftGraphs(self.vllm_config, self.device, cudagraph_mode, self.drafts_by_batch, arms=arms)

    def _prepare_capture(self, num_reqs: int, num_drafts: int) -> Callable[[], None]:
        self.idx_mapping.fill_(-1)
        return partial(self._generate_draft, num_reqs, num_drafts)

    def _draft_step(
        self, input_batch: InputBatch, states: Tensor, num_sampled: Tensor, num_drafts: int, dummy_run: bool
    ) -> None:
        num_reqs = input_batch.num_reqs
        if self.needs_step_seeds:
            self._renew_seeds(input_batch.idx_mapping[:num_reqs])
        graph = None if self.graphs is None else self.graphs.find(num_reqs, num_drafts)
        self._prepare_inputs(input_batch, graph)
        if self.graphs is None or graph is None:
            self._generate_draft(num_reqs, num_drafts)
        else:
            self.graphs.run_fullgraph(graph)
        if self.structured is not None and (rows := self.structured.rows(input_batch)):
            self._generate_masked_draft(input_batch, rows, num_sampled, num_drafts)

    def _stream(self) -> Tensor:
        return self.stream if self.states is None else self.states.stream.gpu

    def _renew_seeds(self, slots: Tensor) -> None:
        """Give requests in slots [R] that are not coupled the seeds of this step's noise."""
        stream, own = self._stream()[slots], self.seeds[slots]
        fresh = step_seeds(own, self.first_pos[: len(slots)] - stream)
        self.seeds[slots] = torch.where(stream == 0, own, fresh)

    def _prepare_inputs(self, input_batch: InputBatch, graph: Any) -> None:
        """Fill other buffers that `_generate_draft` reads; `graph`: the CUDA graph that runs it, or None."""

    def _generate_draft(self, num_reqs: int, num_drafts: int) -> None:
        """Fill drafts [R, K], log q [slots, K, V] and confidences [R, K] from the buffers of inputs."""
        step = self.rows_at_once.get(num_drafts, 1)
        tokens, confidences = self.draft_tokens, self.draft_token_confidence_probs
        for start in range(0, num_reqs, step):
            rows = slice(start, min(start + step, num_reqs))
            made = tokens[rows, :num_drafts], confidences[rows, :num_drafts]
            self._sample(*self._draft_params(rows, num_drafts), rows, *made)

    def _draft_params(self, rows: slice | Tensor, num_drafts: int) -> tuple[CircuitDrafter, DraftParams]:
        """Return the drafter of a batch of these rows, and what it takes."""
        in_blocks = not self.drafter.one_launch
        first = self.first_tokens[rows]
        return self.drafter, self.model.draft_params(self.hidden_states[rows], first, num_drafts, in_blocks)

    def _sample(
        self,
        drafter: CircuitDrafter,
        params: DraftParams,
        rows: slice | Tensor,
        tokens: Tensor,
        confidences: Tensor,
        allowed: Tensor | None = None,
    ) -> None:
        """Fill tokens and confidences [S, K] and log q of these rows; allowed: bitmasks [S, K, words], or None."""
        drafter(
            *params, slots=self.idx_mapping[rows], temperature=self.temperature, seeds=self.seeds,
            pos=self.first_pos[rows], tokens=tokens, confidences=confidences, cache=self.draft_logits,
            allowed=allowed, draw=self.is_drawn,
        )  # fmt: skip

    def _generate_masked_draft(
        self, input_batch: InputBatch, rows: list[int], num_sampled: Tensor, num_drafts: int
    ) -> None:
        """Draft again for the structured requests in these rows, masked with their grammars (`grammar_masks.py`)."""
        assert self.structured is not None  # `_draft_step` asks it for the rows
        step = self.rows_at_once.get(num_drafts, 1)
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            index = async_tensor_h2d(chunk, self.device, torch.int64)
            req_ids = [input_batch.req_ids[row] for row in chunk]
            first = self.draft_tokens[index, :num_drafts]
            masks, drafts = self.structured.masks(req_ids, self.idx_mapping[index].long(), num_sampled[index], first)
            if masks.rows:
                self._follow(masks, drafts, index, num_drafts)
                masks.rewind()

    def _follow(self, masks: Masks, drafts: list[list[int]], index: Tensor, num_drafts: int) -> None:
        """Draft for rows `index` [S] until every draft was made with the mask that the drafts before it lead to."""
        drafter, params = self._draft_params(index, num_drafts)
        made = self.draft_tokens[index, :num_drafts], self.draft_token_confidence_probs[index, :num_drafts]
        ids = self.model.vocabulary and self.model.vocabulary.ids.cpu()
        while (bits := masks.follow(drafts, self.model.vocab_size, ids)) is not None:
            self._sample(drafter, params, index, *made, async_tensor_h2d(bits, self.device))
            drafts = made[0].tolist()  # waits for the device
        self.draft_tokens[index, :num_drafts], self.draft_token_confidence_probs[index, :num_drafts] = made

    def _warm_up(self) -> None:
        """Run the largest draft, and on a GPU one of every shape that Triton compiles for, with padding requests."""
        self.idx_mapping.fill_(-1)
        for num_drafts, max_rows in self.rows_at_once.items():
            for num_reqs in (1, 2) if self.device.type == "cuda" else ():  # a batch of 1 has other strides
                self._generate_draft(min(num_reqs, max_rows), num_drafts)
        num_drafts, max_rows = next(iter(self.rows_at_once.items()))
        self._generate_draft(max_rows, num_drafts)
        masked = (1, 2) if self.structured is not None else ()
        # Triton compiles K = 1 apart
        for num_reqs, num_drafts in product(masked, {min(self.rows_at_once), max(self.rows_at_once)}):
            index = torch.arange(min(num_reqs, self.rows_at_once[num_drafts]), device=self.device)
            bits = index.new_full((len(index), num_drafts, -(-self.model.vocab_size // 32)), -1, dtype=torch.int32)
            made = self.draft_tokens[index, :num_drafts], self.draft_token_confidence_probs[index, :num_drafts]
            self._sample(*self._draft_params(index, num_drafts), index, *made, bits)
