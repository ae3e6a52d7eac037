"""vLLM's V1 model runner, with drafts of `MtpcProposer`."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_mtpc.proposers.heads.counts import with_counts
from vllm_mtpc.proposers.v1 import seeded


class HeadModelRunner(GPUModelRunner):
    """What is added to the V1 runner of any device; `drafter` is a `MtpcProposer`."""

    def begin(self) -> None:
        """Called once vLLM has made the runner."""

    def ready(self) -> None:
        """Called before the first request."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The step's output, with what was cut of its drafts; Ray's executor asks no worker."""
        return with_counts(super().sample_tokens(grammar_output), self.drafter)

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
        """Drafts from the hidden states, which `custom_class` proposers do not get."""
        return self.drafter.propose(
            self, sampled_token_ids, sampling_metadata, sample_hidden_states, spec_decode_metadata, scheduler_output
        )

    def _input_fits_in_drafter(self, common_attn_metadata: Any, *args: Any) -> bool:
        """A head has no length: without this vLLM hands the whole batch zeros where one request comes near the end."""
        return True

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """A step without drafts is sampled as if nothing ever drafted.

        vLLM verifies no rows then, 0.3 ms slower, and its top-k of no rows raises on a CPU.
        """
        if spec_decode_metadata is None or spec_decode_metadata.max_spec_len == 0:
            return super()._sample(logits, None)
        generators = self.input_batch.sampling_metadata.generators
        if not generators or not seeded.couples(self):
            return super()._sample(logits, spec_decode_metadata)
        with seeded.coupled(generators, spec_decode_metadata.num_draft_tokens):
            return super()._sample(logits, spec_decode_metadata)
