"""vLLM's V1 model runner with drafts of `MtpcProposer`; on a CPU requests with a seed are verified by coupling.

Coupling (see `proposers/v2/verification.py`): vLLM's sampler on a CPU derives a token's Gumbel noise from one number of
the request's generator. Drafts and the target's tokens at their rows are sampled with the same numbers, drawn ahead. On
other devices a seed guarantees only the distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Generator, Tensor
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_mtpc.proposers.heads.counts import DRAFTS, PRUNED
from vllm_mtpc.proposers.v1.proposer import draw_numbers, sample_tokens


@contextmanager
def couple_seeded_requests(generators: dict[int, Generator], num_drafts: list[int]) -> Iterator[None]:
    """While a batch is verified, rows with a generator [of B] emit the tokens of plain vLLM."""
    states = {row: generator.get_state() for row, generator in generators.items()}
    # the next number of each generator is then that of the bonus token, which vLLM's sampler draws
    numbers = {row: draw_numbers(generator, num_drafts[row]) for row, generator in generators.items()}
    original = rejection_sampler.rejection_sample

    def rejection_sample(
        drafts: Tensor,  # [T]
        num_drafts: list[int],
        width: int,
        ends: Tensor,  # [B], end of each request's drafts
        draft_probs: Tensor | None,
        target_logits: Tensor,  # [T, V], processed
        bonus: Tensor,  # [B, 1]
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        tokens = original(drafts, num_drafts, width, ends, draft_probs, target_logits, bonus, *args, **kwargs)
        for row, generator in generators.items():
            span = slice(int(ends[row]) - num_drafts[row], int(ends[row]))
            sampled = sample_tokens(target_logits[span], numbers[row])
            kept = 1 + int((sampled == drafts[span]).long().cumprod(0).sum())
            tokens[row] = -1
            tokens[row, :kept] = torch.cat([sampled, bonus[row].to(sampled)])[:kept]
            generator.set_state(states[row])
            draw_numbers(generator, kept)
        return tokens

    rejection_sampler.rejection_sample = rejection_sample
    try:
        yield
    finally:
        rejection_sampler.rejection_sample = original


class HeadModelRunner(GPUModelRunner):
    """Additions to the V1 runner of any device; `drafter` is a `MtpcProposer`."""

    speculative_config: Any

    def begin(self) -> None:
        """Restore vLLM's `min_p` and `logit_bias`, which it drops for engines with drafts; called after __init__."""
        processors = (kind(self.vllm_config, self.device, PIN_MEMORY) for kind in BUILTIN_LOGITS_PROCESSORS)
        self.input_batch.logitsprocs = LogitsProcessors(processors)

    def _update_states(self, scheduler_output: Any) -> Any:
        self.drafter.update_requests(scheduler_output)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a step that verifies nothing as plain vLLM does, without the metadata of no drafts."""
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
        """Sample a step without drafts as plain vLLM does: its top-k of no rows raises on a CPU."""
        if spec_decode_metadata is None or spec_decode_metadata.max_spec_len == 0:
            return super()._sample(logits, None)
        generators = self.input_batch.sampling_metadata.generators if self.couples else {}
        with couple_seeded_requests(generators, spec_decode_metadata.num_draft_tokens) if generators else nullcontext():
            return super()._sample(logits, spec_decode_metadata)
