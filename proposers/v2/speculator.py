"""MtPC drafts on vLLM's Model Runner V2.

Algorithm (per request, after every target pass): gather the target's post-norm hidden state at the last accepted token;
turn it into a circuit over the n tokens that follow; observe x_1, the token the target itself chose; draw the drafts
one after the other from the exact conditionals q(x_k | x_<k), with noise of vLLM's drafting stream (requests with a
seed take the target's own: `verification.py`); leave log q in `draft_logits`, from which vLLM's rejection sampler
scores the drafts. What follows the head's logits is `kernels.draft`. It fills `draft_token_confidence_probs` too, from
the conditionals alone and never from the drawn tokens, so lengths chosen by it keep the output's distribution.

Differences from DraftModelSpeculator:
  * No model pass, no attention, no KV cache: the head reads the target's own hidden state.
  * The window's first token is given, so K <= n - 1 and a step yields at most n tokens.
  * `draft_logits` have the head's dtype, and drafts are drawn from them as rounded: what is scored is drawn from.
  * Confidences are the circuit's own; vLLM's acceptance estimator is not used.

Shapes depend on the number of requests and of drafts only, and there is no host synchronisation. `_draft` is what a
CUDA graph holds (`graphs.py`). Large batches are drafted in goes of as many rows as `vllm_mtpc.heads.memory` allows.
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
from vllm_mtpc.heads.memory import by_batch, rows_at_once
from vllm_mtpc.kernels.draft import naive
from vllm_mtpc.kernels.draft.kernel import Drafter
from vllm_mtpc.kernels.filter import MAX_COMPONENTS
from vllm_mtpc.kernels.leaf.kernel import batches
from vllm_mtpc.proposers.config.versions import keys_noise_by_draft
from vllm_mtpc.proposers.heads.grammar import Masks
from vllm_mtpc.proposers.heads.load import kept, load_served_head, weights_dtype
from vllm_mtpc.proposers.heads.swap import copy_tensors
from vllm_mtpc.proposers.v2.gather import last_rows
from vllm_mtpc.proposers.v2.grammar import StructuredRequests
from vllm_mtpc.proposers.v2.graphs import DraftGraphs
from vllm_mtpc.proposers.v2.verification import (
    DRAFTING,
    CoupledStates,
    Verifier,
    needs_fresh_noise,
    step_seeds,
    with_verifier,
)

SMALL_LEAVES = 1 << 24  # bytes of float32 leaves that are masked at once whatever memory was measured


class MtpcSpeculator(DraftModelSpeculator):
    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.use_acceptance_estimator = False
        self.is_stepped = needs_fresh_noise(self.speculative_config)
        self.hidden_states = torch.zeros(self.max_num_reqs, self.hidden_size, dtype=self.dtype, device=device)
        self.last_rows, self.first_tokens, self.noise_pos = torch.zeros(
            3, self.max_num_reqs, dtype=torch.int64, device=device
        )
        self.is_drawn = self.draft_logits is not None  # drafts; else they are the argmax
        if self.speculative_config.verify == "coupled":  # which scores no draft
            self.draft_logits: Tensor | None = None
        self.states: CoupledStates | None = None  # None: nothing is coupled
        self.step_cols = torch.arange(self.num_speculative_steps, dtype=torch.int32, device=device)
        ranges = self.speculative_config.num_speculative_tokens_per_batch_size
        self.drafts_by_batch = by_batch(ranges, self.max_num_reqs, self.num_speculative_steps)
        self.graphs: DraftGraphs | None = None
        self.structured: StructuredRequests | None = None  # whose drafts are masked; None: nobody's

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        return weights_dtype(self.speculative_config.head_dtype, self.dtype), 0.0

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        head = self._load_head(target_model, self.speculative_config.model_folder)
        self._take(head)
        base = resolve_model_state_cls(self.vllm_config, target_model)
        state = with_verifier(Verifier, base, self.speculative_config, self.device, partial(setattr, self, "states"))
        target_model.get_model_state_cls = lambda: state
        return head

    def _take(self, head: Head) -> None:
        """Everything that follows from a head."""
        logits_dtype = self.dtype if head.needs_lm_head else head.hidden_dtype
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or ()
        self.rows_at_once = rows_at_once(head, self.drafts_by_batch, self.num_speculative_steps, logits_dtype, sizes)
        self.drafter = self._drafter(head)
        program = () if self.drafter is None else (self.drafter.program,)
        head.kept = kept((*head.parameters(), *program))

    @property
    def keeps_shapes(self) -> bool:
        """Whether a head that takes another one's place must have its shapes: of CUDA graphs, of measured memory."""
        return self.device.type != "cpu"

    @torch.inference_mode()
    def prepared(self, made: Any, target_model: nn.Module) -> Callable[[], None]:
        """Reads the head of another configuration; returns what puts it in force (heads/swap.py)."""
        head = self._load_head(target_model, made.model_folder)
        if self.keeps_shapes:
            return partial(copy_tensors, self.model, head)

        def commit() -> None:
            self.model: Head = head
            self._take(head)

        return commit

    def _load_head(self, target_model: nn.Module, folder: str) -> Head:
        dtype = self.speculative_config.head_dtype
        return load_served_head(folder, self.dtype, self.device, target_model, self.dtype, dtype)

    def _drafter(self, head: Head) -> Drafter | None:
        """None: the circuit has more components than the kernel takes."""
        if head.circuit.num_components > MAX_COMPONENTS:
            return None
        return Drafter(
            head.circuit.program,
            head.circuit.num_components,
            head.vocab_size,
            self.device,
            gumbel_noised_argmax,
            self.use_fp64_gumbel,
            shard=head.leaf_shard,
        )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self.graphs = DraftGraphs(self.vllm_config, self.device, cudagraph_mode, self.drafts_by_batch)

    def capture(self) -> None:
        if self.graphs is not None and self.graphs.needs_capture():
            self.graphs.capture_drafts(self._captured)

    def _captured(self, num_reqs: int, num_drafts: int) -> Callable[[], None]:
        """What a graph holds, for a batch of padding alone."""
        self.idx_mapping.fill_(-1)
        return partial(self._draft, num_reqs, num_drafts)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,  # [num_tokens, D], after the final norm
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,  # [R], 0: the prompt is not read to its end
        num_rejected: Tensor,  # [R]
        last_sampled: Tensor,  # [max_num_reqs, 1]
        next_prefill_tokens: Tensor,  # [lookahead, max_num_reqs]
        temperature: Tensor,  # [max_num_reqs]
        seeds: Tensor,  # [max_num_reqs]
        *args: Any,
        dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,  # None: vLLM's dummy runs
        **kwargs: Any,
    ) -> Tensor:
        """Drafts [R, K], int64: the first `num_speculative_tokens` columns; the others are stale."""
        num_reqs = input_batch.num_reqs
        scheduled = self.drafts_by_batch[num_reqs]
        num_drafts = scheduled if num_speculative_tokens is None else num_speculative_tokens
        if is_profile:  # vLLM measures how much is left for the KV cache
            self._warm_up()
            return self.draft_tokens[:num_reqs]
        if num_drafts > 0:
            self._copy_request_inputs(num_reqs, input_batch.idx_mapping[:num_reqs], temperature, seeds, dummy_run)
            # vLLM keys the noise of a token by the position before it: that of x_1 for the first draft
            starts = (self.last_rows, self.first_tokens, self.noise_pos)
            last_rows(input_batch, num_sampled, num_rejected, last_sampled, next_prefill_tokens, *starts)
            slots = input_batch.idx_mapping[:num_reqs]
            stream = DRAFTING if self.states is None else self.states.stream.gpu[slots]
            if self.is_stepped:  # and there are states
                own = self.seeds[slots]
                self.seeds[slots] = torch.where(stream == 0, own, step_seeds(own, self.noise_pos[:num_reqs]))
            self.noise_pos[:num_reqs] += stream
            graph = None if self.graphs is None else self.graphs.find(num_reqs, num_drafts)
            self._read(input_batch, last_hidden_states, graph)
            if self.graphs is None or graph is None:
                self._draft(num_reqs, num_drafts)
            else:
                self.graphs.run_fullgraph(graph)
            if self.structured is not None and (rows := self.structured.rows(input_batch)):
                self._draft_masked(input_batch, rows, num_sampled, num_drafts)
        return self.draft_tokens[:num_reqs]

    def _read(self, input_batch: InputBatch, last_hidden_states: Tensor, graph: Any) -> None:
        """Fills what `_draft` begins with; `graph`: that which will run it, if one does."""
        num_reqs = input_batch.num_reqs
        torch.index_select(last_hidden_states, 0, self.last_rows[:num_reqs], out=self.hidden_states[:num_reqs])

    def _draft_masked(self, input_batch: InputBatch, rows: list[int], num_sampled: Tensor, num_drafts: int) -> None:
        """Drafts of structured requests once more, as their grammars allow; waits for the device at every draft.

        The definition has some float32 copies of a leaf next to the head's logits: a quarter of the usual rows at once
        take no more memory than was measured, and few small ones are not worth a second go.
        """
        assert self.structured is not None  # `propose` asks it for the rows
        leaf = self.model.circuit.num_components * self.model.vocab_size * torch.float32.itemsize
        step = max(1, self.rows_at_once.get(num_drafts, 1) // 4, SMALL_LEAVES // leaf)
        for some in (rows[start : start + step] for start in range(0, len(rows), step)):
            at = torch.tensor(some, device=self.device)
            names = [input_batch.req_ids[row] for row in some]
            masks = self.structured.masks(names, self.idx_mapping[at].long(), num_sampled[at])
            if masks.rows:
                params = self.model.draft_params(self.hidden_states[at], self.first_tokens[at], num_drafts)
                self._draft_by_definition(params, at, masks)
                masks.rewind()

    def _warm_up(self) -> None:
        """The largest draft, and on a GPU one of every shape that Triton compiles for, for nobody.

        While vLLM measures memory: there is room then, and what the compiler takes is not taken for a graph's.
        """
        self.idx_mapping.fill_(-1)
        for num_drafts, most in self.rows_at_once.items():
            for num_reqs in batches(most) if self.device.type == "cuda" else ():
                self._draft(num_reqs, num_drafts)
        num_drafts, rows = next(iter(self.rows_at_once.items()))
        self._draft(rows, num_drafts)
        for num_reqs in (1, 2) if self.structured is not None else ():  # what is masked is drafted by the definition
            at = torch.arange(min(num_reqs, self.max_num_reqs), device=self.device)
            params = self.model.draft_params(self.hidden_states[at], self.first_tokens[at], max(self.rows_at_once))
            self._draft_by_definition(params, at)

    def _draft(self, num_reqs: int, num_drafts: int) -> None:
        """Drafts [R, K], their conditionals and confidences, from hidden_states, first_tokens and noise_pos."""
        step = self.rows_at_once.get(num_drafts, 1)
        for start in range(0, num_reqs, step):
            rows = slice(start, min(start + step, num_reqs))
            params = self.model.draft_params(self.hidden_states[rows], self.first_tokens[rows], num_drafts)
            if self.drafter is None:
                self._draft_by_definition(params, rows)
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

    def _draft_by_definition(self, params: DraftParams, rows: slice | Tensor, masks: Masks | None = None) -> None:
        """The same in PyTorch, a few launches per draft and operation of the circuit."""
        num_drafts = params.leaf.shape[1]
        slots, cache = self.idx_mapping[rows], self.draft_logits
        dtype = torch.float32 if cache is None else cache.dtype
        temperature = torch.where(slots < 0, 0.0, self.temperature[slots.clamp(min=0)])

        def pick(log_q: Tensor, k: int) -> Tensor:
            self.draft_token_confidence_probs[rows, k] = naive.confidence(log_q, temperature, self.is_drawn)
            if not self.is_drawn:
                return log_q.argmax(dim=-1)
            # a draft's number that vLLM mixes in is taken out again: the kernel has none, and it would undo a step's
            seeds = self.seeds ^ (k << 32) if cache is not None and keys_noise_by_draft() else self.seeds
            return gumbel_sample(
                log_q.to(dtype),  # exact but for masked ones; vLLM reads it as float32
                slots,
                self.temperature,
                seeds,
                self.noise_pos[rows] + k,
                apply_temperature=True,
                is_drafting=False,  # its stream is in the position
                logits_cache=cache,
                logits_cache_col=None if cache is None else self.step_cols[k],
                use_fp64=self.use_fp64_gumbel,
            )

        program = self.model.circuit.program
        chosen = pick if masks is None else masks.around(pick)
        self.draft_tokens[rows, :num_drafts] = naive.draft(
            program, *params, pick=chosen, dtype=dtype, shard=self.model.leaf_shard
        )
