"""MtPC drafts on vLLM's Model Runner V2.

Algorithm (per request, after every target pass): gather the target's post-norm hidden state at the
last accepted token; turn it into a circuit over the n tokens that follow; observe x_1, the token the
target itself chose; draw x_2 .. x_{1+K} one after the other from the exact conditionals
q(x_k | x_<k), on vLLM's drafting stream; leave log q in `draft_logits`, from which vLLM's rejection
sampler recomputes the law the draft was drawn from. What follows the head's logits is `kernels.draft`:
one launch where the vocabulary is small. It fills `draft_token_confidence_probs` too, from the
conditionals alone and never from the drawn tokens, so lengths chosen by it keep the output's law.

Differences from DraftModelSpeculator:
  * No model pass, no attention, no KV cache: the head reads the target's own hidden state.
  * The window's first token is given, so K <= n - 1 and a step yields at most n tokens.
  * `draft_logits` have the head's dtype, and drafts are drawn from them as rounded: what is scored is drawn from.
  * Confidences are the circuit's own; vLLM's acceptance estimator is not used.

The draft runs eagerly between two target graphs: shapes depend on the number of requests and of drafts
only, there is no host synchronisation, and unscheduled rows are computed and ignored. `_draft` is what a
graph would hold: it reads and writes buffers made at load time, and allocates only what the head does.
"""

from __future__ import annotations

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
from vllm_mtpc.proposers.load import load_served_head, weights_dtype
from vllm_mtpc.proposers.seam.versions import keys_noise_by_draft
from vllm_mtpc.proposers.v2.gather import last_rows
from vllm_mtpc.proposers.v2.grammar import with_residual
from vllm_mtpc.proposers.v2.stepped import needs_fresh_noise, step_seeds, with_stepped_noise


class MtpcSpeculator(DraftModelSpeculator):
    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.use_acceptance_estimator = False
        self.is_stepped = needs_fresh_noise(self.speculative_config)
        self.hidden_states = torch.zeros(self.max_num_reqs, self.hidden_size, dtype=self.dtype, device=device)
        self.last_rows, self.first_tokens, self.noise_pos = torch.zeros(
            3, self.max_num_reqs, dtype=torch.int64, device=device
        )
        self.step_cols = torch.arange(self.num_speculative_steps, dtype=torch.int32, device=device)

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        return weights_dtype(self.speculative_config.head_dtype, self.dtype, self.device), 0.0

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        spec = self.speculative_config
        head = load_served_head(spec.model_folder, self.dtype, self.device, target_model, self.dtype, spec.head_dtype)
        self.drafter = self._drafter(head)
        base = resolve_model_state_cls(self.vllm_config, target_model)
        if self.is_stepped and not keys_noise_by_draft():
            state = with_stepped_noise(base, self.speculative_config, self.device, self.max_num_reqs)
        else:
            state = with_residual(base, self.speculative_config, self.device)
        target_model.get_model_state_cls = lambda: state
        return head

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
        )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Nothing to manage: the draft is not captured."""

    def capture(self) -> None:
        """Nothing to capture."""

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
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Drafts [R, K], int64: the first `num_speculative_tokens` columns (None: all); the others are stale."""
        if kwargs.get("is_profile"):
            self._warm_up()
        num_reqs = input_batch.num_reqs
        num_drafts = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        if num_drafts > 0:
            self._copy_request_inputs(num_reqs, input_batch.idx_mapping[:num_reqs], temperature, seeds, dummy_run)
            # vLLM keys the noise of a token by the position before it: that of x_1 for the first draft
            starts = (self.last_rows, self.first_tokens, self.noise_pos)
            last_rows(input_batch, num_sampled, num_rejected, last_sampled, next_prefill_tokens, *starts)
            if self.is_stepped:
                slots = input_batch.idx_mapping[:num_reqs]
                self.seeds[slots] = step_seeds(self.seeds[slots], self.noise_pos[:num_reqs])
            torch.index_select(last_hidden_states, 0, self.last_rows[:num_reqs], out=self.hidden_states[:num_reqs])
            self._draft(num_reqs, num_drafts)
        return self.draft_tokens[:num_reqs]

    def _warm_up(self) -> None:
        """Drafts for nobody, so that Triton has compiled all that is launched while serving.

        While vLLM measures memory: there is room then, and what the compiler takes is not taken for a graph's.
        """
        if self.device.type != "cuda":  # nothing is compiled
            return
        self.idx_mapping.fill_(-1)
        for num_reqs in batches(self.max_num_reqs):
            self._draft(num_reqs, 1)

    def _draft(self, num_reqs: int, num_drafts: int) -> None:
        """Drafts [R, K], their conditionals and confidences, from hidden_states, first_tokens and noise_pos."""
        params = self.model.draft_params(self.hidden_states[:num_reqs], self.first_tokens[:num_reqs], num_drafts)
        if self.drafter is None:
            self._draft_by_definition(params)
            return
        self.drafter(
            *params,
            slots=self.idx_mapping[:num_reqs],
            temperature=self.temperature,
            seeds=self.seeds,
            pos=self.noise_pos[:num_reqs],
            tokens=self.draft_tokens[:num_reqs, :num_drafts],
            confidences=self.draft_token_confidence_probs[:num_reqs, :num_drafts],
            cache=self.draft_logits,
            draw=self.draft_logits is not None,
        )

    def _draft_by_definition(self, params: DraftParams) -> None:
        """The same in PyTorch, a few launches per draft and operation of the circuit."""
        num_reqs, num_drafts = params.leaf.shape[:2]
        slots, is_drawn = self.idx_mapping[:num_reqs], self.draft_logits is not None
        temperature = torch.where(slots < 0, 0.0, self.temperature[slots.clamp(min=0)])

        def pick(log_q: Tensor, k: int) -> Tensor:
            self.draft_token_confidence_probs[:num_reqs, k] = naive.confidence(log_q, temperature, is_drawn)
            if not is_drawn:
                return log_q.argmax(dim=-1)
            # a draft's number that vLLM mixes in is taken out again: the kernel has none, and it would undo a step's
            seeds = self.seeds ^ (k << 32) if keys_noise_by_draft() else self.seeds
            return gumbel_sample(
                log_q.to(self.draft_logits.dtype),  # exact: it is rounded already; vLLM reads it as float32
                slots,
                self.temperature,
                seeds,
                self.noise_pos[:num_reqs] + k,
                apply_temperature=True,
                is_drafting=True,
                logits_cache=self.draft_logits,
                logits_cache_col=self.step_cols[k],
                use_fp64=self.use_fp64_gumbel,
            )

        program = self.model.circuit.program
        dtype = self.draft_logits.dtype if is_drawn else torch.float32
        self.draft_tokens[:num_reqs, :num_drafts] = naive.draft(program, *params, pick, dtype)
