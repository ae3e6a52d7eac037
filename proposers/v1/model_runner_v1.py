"""vLLM's V1 model runner with drafts of `MtpcProposer`; on a CPU they are verified by `verification.py`."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from typing import Any

from torch import Tensor
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_mtpc.proposers.v1.verification import verify_here
from vllm_mtpc.proposers.worker.counts import DRAFTS, PRUNED
from vllm_mtpc.proposers.worker.derive import extend_object


class DraftedThinkingBudget(ThinkingBudgetStateHolder):
    """Forces the end of thinking where plain vLLM does; vLLM 0.32 misses what starts or ends among drafts."""

    def keep_states(self, requests: list[dict[str, Any]]) -> None:
        """Keep states in the attributes of requests: vLLM makes a new one for a request that returns to the batch."""
        for row, state in self._state.items():
            kept, length = requests[row].get("thinking", state), len(requests[row]["output_token_ids"])
            self._state[row] = requests[row]["thinking"] = kept if kept.get("followed", 0) <= length else state

    def update_state(self, output_token_ids: list[list[int]], spec_token_ids: Any, repeat_indices: Any = None) -> None:
        """Compute the tokens, or None, that are forced after each request's text and after each of its drafts."""
        self.forced: list[list[int | None]] = [[None] * (len(drafts) + 1) for drafts in spec_token_ids]
        for row, state in self._state.items():
            text, drafts = output_token_ids[row], spec_token_ids[row]
            for length in range(state.get("followed", len(text)) + 1, len(text)):
                self._follow(state, text[:length])
            self.forced[row][0], state["followed"] = self._follow(state, text), len(text)
            ahead = dict(state)
            self.forced[row][1:] = [self._follow(ahead, text + drafts[: k + 1]) for k in range(len(drafts))]

    def _follow(self, state: dict[str, Any], text: list[int]) -> int | None:
        """Advance a state to this text, at most one token longer; return the token that is forced after it."""
        state |= {"output_tok_ids": text, "spec_token_ids": [], "force_index": []}
        self._update_think_state(state)
        return self.think_end_token_ids[state["end_count"]] if state["in_end"] and state["force_index"] else None

    def apply_to_logits(self, logits: Tensor, predict_bonus_token: bool, spec_token_ids: Any) -> Tensor:
        rows = [tokens[-1:] if predict_bonus_token else tokens[:-1] for tokens in self.forced]
        for at, token in enumerate(chain(*rows)):
            if token is not None:
                logits[at, token] = 1e9
        return logits


class HeadModelRunner(GPUModelRunner):
    """Additions to the V1 runner of any device; `drafter` is a `MtpcProposer`."""

    speculative_config: Any

    def begin(self) -> None:
        """Restore vLLM's `min_p` and `logit_bias`, which it drops for engines with drafts; called after __init__."""
        processors = (kind(self.vllm_config, self.device, PIN_MEMORY) for kind in BUILTIN_LOGITS_PROCESSORS)
        self.input_batch.logitsprocs = LogitsProcessors(processors)

    def _update_states(self, scheduler_output: Any) -> Any:
        self.drafter.update_requests(scheduler_output)
        updated = super()._update_states(scheduler_output)
        if (holder := self.input_batch.thinking_budget_state_holder) is not None:
            extend_object(holder, DraftedThinkingBudget)
            holder.keep_states([vars(self.requests[name]) for name in self.input_batch.req_ids])
        return updated

    def _prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a step that verifies nothing as plain vLLM: only recurrent layers read the metadata of no drafts."""
        if scheduler_output.scheduled_spec_decode_tokens:
            return super()._prepare_inputs(scheduler_output, *args, **kwargs)
        self.speculative_config = None
        try:
            return super()._prepare_inputs(scheduler_output, *args, **kwargs)
        finally:
            self.speculative_config = self.vllm_config.speculative_config

    @property
    def couples(self) -> bool:
        spec, sampler = self.speculative_config, self.sampler.topk_topp_sampler
        is_plain = sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel
        return is_plain and spec.verify != "rejection" and spec.rejection_sample_method == "standard"

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample in the same call if no grammar is awaited: each call of a worker waits for another process."""
        output = super().execute_model(scheduler_output, *args, **kwargs)
        if self.execute_model_state is None or scheduler_output.has_structured_output_requests:
            return output
        return self.sample_tokens(None)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Return the output with the pruned drafts, and with the drafts, for which vLLM calls the worker once more."""
        output = super().sample_tokens(grammar_output)
        if not output.req_ids:
            return output
        setattr(output, PRUNED, dict(self.drafter.pruned))
        self.drafter.pruned.clear()
        taken = self.take_draft_token_ids()
        if taken is not None and any(taken.draft_token_ids):  # else the scheduler would read lists of nothing
            setattr(output, DRAFTS, taken)
        return output

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Draft from hidden states, which vLLM does not pass to proposers of method `custom_class`."""
        return self.drafter.propose(
            self, sampled_token_ids, sampling_metadata, sample_hidden_states, spec_decode_metadata, scheduler_output
        )

    def _input_fits_in_drafter(self, common_attn_metadata: Any, *args: Any) -> bool:
        """Return True: a head has no maximum length. vLLM would draft zeros near the end of one request."""
        return True

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Sample a step without drafts by vLLM's sampler of the last tokens: its top-k of no rows raises on a CPU."""
        if spec_decode_metadata is None or spec_decode_metadata.max_spec_len == 0:
            return self.sampler(logits, self.input_batch.sampling_metadata, predict_bonus_token=True)
        generators = self.input_batch.sampling_metadata.generators if self.couples else {}
        is_ours = self.device.type == "cpu"
        with verify_here(generators, spec_decode_metadata.num_draft_tokens) if is_ours else nullcontext():
            return super()._sample(logits, spec_decode_metadata)
