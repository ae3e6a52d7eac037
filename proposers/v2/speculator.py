"""MtPC drafts on vLLM's Model Runner V2.

Algorithm (per request, after every target pass): gather the target's post-norm hidden state at the
last accepted token; turn it into a circuit over the n tokens that follow; observe x_1, the token the
target itself chose; draw x_2 .. x_{1+K} one after the other from the exact conditionals
q(x_k | x_<k), each through vLLM's `gumbel_sample` on the drafting stream; leave log q in
`draft_logits`, from which vLLM's rejection sampler recomputes the law the draft was drawn from.

Differences from DraftModelSpeculator:
  * No model pass, no attention, no KV cache: the head reads the target's own hidden state.
  * The window's first token is given, so K <= n - 1 and a step yields at most n tokens.
  * `draft_logits` are float32: drawn from and scored with the same numbers.

The draft runs eagerly between two target graphs: shapes depend on the number of requests only, there
is no host synchronisation, and unscheduled rows are computed and ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_mtpc.proposers.load import load_served_head


class MtpcSpeculator(DraftModelSpeculator):
    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.hidden_states = torch.zeros(self.max_num_reqs, self.hidden_size, dtype=self.dtype, device=device)
        self.step_cols = torch.arange(self.num_speculative_steps, dtype=torch.int32, device=device)

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        return torch.float32, 0.0

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        folder = self.speculative_config.model_folder
        return load_served_head(folder, self.dtype, self.device, target_model, self.dtype)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Nothing to manage: the draft is not captured."""

    def capture(self) -> None:
        """Nothing to capture."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,  # [num_tokens, D], after the final norm
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,  # [R], 0: the prompt is not read to its end
        num_rejected: torch.Tensor,  # [R]
        last_sampled: torch.Tensor,  # [max_num_reqs, 1]
        next_prefill_tokens: torch.Tensor,  # [lookahead, max_num_reqs]
        temperature: torch.Tensor,  # [max_num_reqs]
        seeds: torch.Tensor,  # [max_num_reqs]
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Drafts [R, K], int64; columns a batch does not schedule are drafted all the same."""
        num_reqs = input_batch.num_reqs
        slots = input_batch.idx_mapping[:num_reqs]
        self._copy_request_inputs(num_reqs, slots, temperature, seeds, dummy_run)
        last_rows = (input_batch.query_start_loc[1 : num_reqs + 1] - num_rejected[:num_reqs] - 1).long()
        hidden = torch.index_select(last_hidden_states, 0, last_rows, out=self.hidden_states[:num_reqs])
        first = torch.where(num_sampled[:num_reqs] > 0, last_sampled[slots, 0], next_prefill_tokens[0, slots])
        # vLLM keys the noise of a token by the position before it: that of x_1 for the first draft
        noise_pos = input_batch.positions[last_rows] + 1  # [R]

        circuit, params = self.model.circuit, self.model(hidden, self.num_speculative_steps + 1)
        state = circuit.observe(params, circuit.start(params), 0, first.long())
        for step in range(self.num_speculative_steps):
            log_probs = circuit.next_log_probs(params, state, step + 1)  # [R, V]
            token = self._pick(log_probs, noise_pos + step, step)
            self.draft_tokens[:num_reqs, step] = token
            state = circuit.observe(params, state, step + 1, token)
        return self.draft_tokens[:num_reqs]

    def _pick(self, log_probs: torch.Tensor, noise_pos: torch.Tensor, step: int) -> torch.Tensor:
        """One draft per request [R]: a draw at its temperature (argmax at 0), or argmax for greedy drafting."""
        if self.draft_logits is None:
            return log_probs.argmax(dim=-1)
        return gumbel_sample(
            log_probs,
            self.idx_mapping[: log_probs.shape[0]],
            self.temperature,
            self.seeds,
            noise_pos,
            apply_temperature=True,
            is_drafting=True,
            logits_cache=self.draft_logits,
            logits_cache_col=self.step_cols[step],
            use_fp64=self.use_fp64_gumbel,
        )
