"""MtPC drafts on vLLM's Model Runner V2.

Algorithm, per request, after every target forward pass:
  1. gather the target's post-norm hidden state at the last accepted token, and x_1, the token that the target chose;
  2. compute from the hidden state the parameters of a circuit over the window of n tokens that starts with x_1;
  3. condition the circuit on x_1 and sample the drafts x_2 .. x_{K+1}, K < n, each from q(x_k | x_<k) (MtPC, eq. 7),
     with vLLM's Gumbel noise: of its drafting stream, or of the target's own for coupled requests (`verification.py`);
  4. store log q in `draft_logits`, which vLLM's rejection sampler scores the drafts with.

`_generate_draft` is steps 2 to 4. It depends on fixed buffers alone and CUDA graphs hold it (`graphs.py`). Only drafts
of requests with a grammar wait for the host (`structured_requests.py`).

`draft_logits` have the head's dtype, and drafts are sampled from the rounded numbers that are scored.
`draft_token_confidence_probs` depend on the conditionals, never on the sampled tokens: the output distribution of draft
lengths chosen by them is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax, gumbel_sample
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_mtpc.heads.base import DraftParams, Head
from vllm_mtpc.kernels.draft import naive
from vllm_mtpc.kernels.draft.kernel import Drafter
from vllm_mtpc.kernels.filter import MAX_COMPONENTS
from vllm_mtpc.kernels.leaf.kernel import batches
from vllm_mtpc.plan.draft_schedule import expand_schedule
from vllm_mtpc.proposers.config.draft_memory import rows_at_once
from vllm_mtpc.proposers.config.versions import keys_noise_by_draft
from vllm_mtpc.proposers.heads.grammar_masks import Masks
from vllm_mtpc.proposers.heads.load import kept, load_served_head, weights_dtype
from vllm_mtpc.proposers.heads.swap import copy_tensors
from vllm_mtpc.proposers.v2.gather import gather_last_rows
from vllm_mtpc.proposers.v2.graphs import DraftGraphs
from vllm_mtpc.proposers.v2.structured_requests import StructuredRequests
from vllm_mtpc.proposers.v2.verification import (
    DRAFTING,
    CoupledStates,
    Verifier,
    needs_fresh_noise,
    step_seeds,
    with_verifier,
)

SMALL_LEAVES = 1 << 24  # bytes of float32 leaves that are masked in one chunk whatever memory was measured


class MtpcSpeculator(DraftModelSpeculator):
    """Drafts of a head that reads the target's hidden states."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.use_acceptance_estimator = False
        self.needs_step_seeds = needs_fresh_noise(self.speculative_config)
        self.hidden_states = torch.zeros(self.max_num_reqs, self.hidden_size, dtype=self.dtype, device=device)
        self.last_rows, self.first_tokens, self.noise_pos = torch.zeros(
            3, self.max_num_reqs, dtype=torch.int64, device=device
        )
        self.is_drawn = self.draft_logits is not None  # else drafts are the argmax
        if self.speculative_config.verify == "coupled":  # no draft is scored
            self.draft_logits: Tensor | None = None
        self.states: CoupledStates | None = None  # None: no request is coupled
        self.step_cols = torch.arange(self.num_speculative_steps, dtype=torch.int32, device=device)
        ranges = self.speculative_config.num_speculative_tokens_per_batch_size
        self.drafts_by_batch = expand_schedule(ranges, self.max_num_reqs, self.num_speculative_steps)
        self.graphs: DraftGraphs | None = None
        self.structured: StructuredRequests | None = None  # None: drafts are not masked with grammars

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        return weights_dtype(self.speculative_config.head_dtype, self.dtype), 0.0

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        head = self._load_head(target_model, self.speculative_config.model_folder)
        self._set_head(head)
        base = resolve_model_state_cls(self.vllm_config, target_model)
        state = with_verifier(Verifier, base, self.speculative_config, self.device, partial(setattr, self, "states"))
        target_model.get_model_state_cls = lambda: state
        return head

    def _load_head(self, target_model: nn.Module, folder: str) -> Head:
        dtype = self.speculative_config.head_dtype
        return load_served_head(folder, self.dtype, self.device, target_model, self.dtype, dtype)

    def _set_head(self, head: Head) -> None:
        logits_dtype = self.dtype if head.needs_lm_head else head.hidden_dtype
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or ()
        self.rows_at_once = rows_at_once(head, self.drafts_by_batch, self.num_speculative_steps, logits_dtype, sizes)
        self.drafter = self._make_drafter(head)
        program = () if self.drafter is None else (self.drafter.program,)
        head.kept = kept((*head.parameters(), *program))

    def _make_drafter(self, head: Head) -> Drafter | None:
        """Return the draft kernel, or None where the circuit has more components than it takes."""
        program, size, noised_argmax = head.circuit.program, head.circuit.num_components, gumbel_noised_argmax
        if size > MAX_COMPONENTS:
            return None
        return Drafter(
            program, size, head.vocab_size, self.device, noised_argmax, self.use_fp64_gumbel, shard=head.leaf_shard
        )

    @property
    def keeps_shapes(self) -> bool:
        """Whether a swapped head must have the served one's shapes: CUDA graphs and measured memory depend on them."""
        return self.device.type != "cpu"

    @torch.inference_mode()
    def prepared(self, made: Any, target_model: nn.Module) -> Callable[[], None]:
        """Load the head of another speculative config; return what activates it (`heads/swap.py`)."""
        head = self._load_head(target_model, made.model_folder)
        if self.keeps_shapes:
            return partial(copy_tensors, self.model, head)

        def activate() -> None:
            self.model: Head = head
            self._set_head(head)

        return activate

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self.graphs = DraftGraphs(self.vllm_config, self.device, cudagraph_mode, self.drafts_by_batch)

    def capture(self) -> None:
        if self.graphs is not None and self.graphs.needs_capture():
            self.graphs.capture_drafts(self._prepare_capture)

    def _prepare_capture(self, num_reqs: int, num_drafts: int) -> Callable[[], None]:
        self.idx_mapping.fill_(-1)
        return partial(self._generate_draft, num_reqs, num_drafts)

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
        dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Draft for the R requests of a step.

        Args:
            attn_metadata, slot_mappings: by layer; None before there are KV caches.
            last_hidden_states, aux_hidden_states: [num_tokens, D], after the final norm, and of selected layers.
            num_sampled, num_rejected: [R], tokens and rejected drafts; 0 tokens where a prompt is not read to its end.
            last_sampled, next_prefill_tokens: [max_num_reqs, 1] and [lookahead, max_num_reqs].
            temperature, seeds: [max_num_reqs].
            num_speculative_tokens: None in vLLM's dummy runs.

        Returns:
            [R, K], int64; the first `num_speculative_tokens` columns are drafts, the others are stale.
        """
        num_reqs = input_batch.num_reqs
        scheduled = self.drafts_by_batch[num_reqs]
        num_drafts = scheduled if num_speculative_tokens is None else num_speculative_tokens
        if is_profile:  # vLLM measures the memory that is left for the KV cache
            self._warm_up()
            return self.draft_tokens[:num_reqs]
        if num_drafts > 0:
            slots = input_batch.idx_mapping[:num_reqs]
            self._copy_request_inputs(num_reqs, slots, temperature, seeds, dummy_run)
            # vLLM keys the noise of a token by the position before it: that of x_1 for the first draft
            starts = (self.last_rows, self.first_tokens, self.noise_pos)
            gather_last_rows(input_batch, num_sampled, num_rejected, last_sampled, next_prefill_tokens, *starts)
            self._select_noise(slots)
            graph = None if self.graphs is None else self.graphs.find(num_reqs, num_drafts)
            self._prepare_inputs(input_batch, last_hidden_states, graph)
            if self.graphs is None or graph is None:
                self._generate_draft(num_reqs, num_drafts)
            else:
                self.graphs.run_fullgraph(graph)
            if self.structured is not None and (rows := self.structured.rows(input_batch)):
                self._generate_masked_draft(input_batch, rows, num_sampled, num_drafts)
        return self.draft_tokens[:num_reqs]

    def _select_noise(self, slots: Tensor) -> None:
        """Move positions, and seeds where needed, of the requests in slots [R] to the noise of their verification."""
        num_reqs = len(slots)
        stream = DRAFTING if self.states is None else self.states.stream.gpu[slots]
        if self.needs_step_seeds:
            own = self.seeds[slots]
            self.seeds[slots] = torch.where(stream == 0, own, step_seeds(own, self.noise_pos[:num_reqs]))
        self.noise_pos[:num_reqs] += stream

    def _prepare_inputs(self, input_batch: InputBatch, last_hidden_states: Tensor, graph: Any) -> None:
        """Fill the buffers that `_generate_draft` reads; `graph`: the CUDA graph that runs it, or None."""
        num_reqs = input_batch.num_reqs
        torch.index_select(last_hidden_states, 0, self.last_rows[:num_reqs], out=self.hidden_states[:num_reqs])

    def _generate_draft(self, num_reqs: int, num_drafts: int) -> None:
        """Fill drafts [R, K], log q [slots, K, V] and confidences [R, K] from the buffers of inputs."""
        step = self.rows_at_once.get(num_drafts, 1)
        for start in range(0, num_reqs, step):
            rows = slice(start, min(start + step, num_reqs))
            params = self.model.draft_params(self.hidden_states[rows], self.first_tokens[rows], num_drafts)
            if self.drafter is None:
                self._sample_sequential(params, rows)
                continue
            self.drafter(
                *params,
                slots=self.idx_mapping[rows],
                temperature=self.temperature,
                seeds=self.seeds,
                pos=self.noise_pos[rows],
                tokens=self.draft_tokens[rows, :num_drafts],
                confidences=self.draft_token_confidence_probs[rows, :num_drafts],
                cache=self.draft_logits,
                draw=self.is_drawn,
            )

    def _sample_sequential(self, params: DraftParams, rows: slice | Tensor, masks: Masks | None = None) -> None:
        """Sample the drafts of these rows one after the other in PyTorch, as the kernel does; optionally masked."""
        num_drafts = params.leaf.shape[1]
        slots, cache = self.idx_mapping[rows], self.draft_logits
        dtype = torch.float32 if cache is None else cache.dtype
        temperature = torch.where(slots < 0, 0.0, self.temperature[slots.clamp(min=0)])

        def pick(log_q: Tensor, k: int) -> Tensor:
            self.draft_token_confidence_probs[rows, k] = naive.confidence(log_q, temperature, self.is_drawn)
            if not self.is_drawn:
                return log_q.argmax(dim=-1)
            # undo the number of the draft that vLLM mixes in: the kernel has none, and it would undo a step's seed
            seeds = self.seeds ^ (k << 32) if cache is not None and keys_noise_by_draft() else self.seeds
            return gumbel_sample(
                log_q.to(dtype),  # exact but for masked ones; vLLM reads it as float32
                slots,
                self.temperature,
                seeds,
                self.noise_pos[rows] + k,
                apply_temperature=True,
                is_drafting=False,  # the position selects the stream
                logits_cache=cache,
                logits_cache_col=None if cache is None else self.step_cols[k],
                use_fp64=self.use_fp64_gumbel,
            )

        self.draft_tokens[rows, :num_drafts] = naive.draft(
            self.model.circuit.program,
            *params,
            pick=pick if masks is None else masks.around(pick),
            dtype=dtype,
            shard=self.model.leaf_shard,
        )

    def _generate_masked_draft(
        self, input_batch: InputBatch, rows: list[int], num_sampled: Tensor, num_drafts: int
    ) -> None:
        """Draft again for the structured requests in these rows, masked with their grammars; waits for the device."""
        assert self.structured is not None  # `propose` asks it for the rows
        # `_sample_sequential` has float32 copies of a leaf next to the logits: a quarter of the usual rows
        leaf_bytes = self.model.circuit.num_components * self.model.vocab_size * torch.float32.itemsize
        step = max(1, self.rows_at_once.get(num_drafts, 1) // 4, SMALL_LEAVES // leaf_bytes)
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            index = torch.tensor(chunk, device=self.device)
            req_ids = [input_batch.req_ids[row] for row in chunk]
            masks = self.structured.masks(req_ids, self.idx_mapping[index].long(), num_sampled[index])
            if masks.rows:
                params = self.model.draft_params(self.hidden_states[index], self.first_tokens[index], num_drafts)
                self._sample_sequential(params, index, masks)
                masks.rewind()

    def _warm_up(self) -> None:
        """Run the largest draft, and on a GPU one of every shape that Triton compiles for, with padding requests."""
        self.idx_mapping.fill_(-1)
        for num_drafts, max_rows in self.rows_at_once.items():
            for num_reqs in batches(max_rows) if self.device.type == "cuda" else ():
                self._generate_draft(num_reqs, num_drafts)
        num_drafts, max_rows = next(iter(self.rows_at_once.items()))
        self._generate_draft(max_rows, num_drafts)
        for num_reqs in (1, 2) if self.structured is not None else ():
            index, most = torch.arange(min(num_reqs, self.max_num_reqs), device=self.device), max(self.rows_at_once)
            params = self.model.draft_params(self.hidden_states[index], self.first_tokens[index], most)
            self._sample_sequential(params, index)
