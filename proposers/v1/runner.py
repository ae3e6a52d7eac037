"""vLLM's V1 model runner, with drafts of `MtpcProposer`; requests with a seed are verified by coupling on a CPU.

Coupling (`v2/verification.py` says what it gives): vLLM's sampler on a CPU draws one number per token from the
request's generator, and hashes the token's Gumbel noise from it. So the numbers of the next tokens can be read ahead
and put back: drafts are drawn with them, the target's token at a drafted row is drawn with the same, and the generator
moves on by as many as were kept. On other devices V1 draws noise of the vocabulary's size per token, and what a step
kept is known when it is over; there a seed promises the distribution alone.
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

from vllm_mtpc.proposers.heads.counts import with_counts
from vllm_mtpc.proposers.v1.proposer import draw, take


@contextmanager
def coupled(generators: dict[int, Generator], num_drafts: list[int]) -> Iterator[None]:
    """While a batch is verified: the tokens of rows with a generator [of B] are plain vLLM's."""
    states = {row: generator.get_state() for row, generator in generators.items()}
    # a generator then stands before the number of the bonus token, which vLLM's sampler draws
    numbers = {row: take(generator, num_drafts[row]) for row, generator in generators.items()}
    theirs = rejection_sampler.rejection_sample

    def rejection_sample(
        drafts: Tensor,  # [T]
        num_drafts: list[int],
        width: int,
        ends: Tensor,  # [B] of each request's drafts
        draft_probs: Tensor | None,
        target_logits: Tensor,  # [T, V], processed
        bonus: Tensor,  # [B, 1]
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Tokens [B, K + 1] int32, -1 behind the last."""
        tokens = theirs(drafts, num_drafts, width, ends, draft_probs, target_logits, bonus, *args, **kwargs)
        for row, generator in generators.items():
            at = slice(int(ends[row]) - num_drafts[row], int(ends[row]))
            drawn = draw(target_logits[at], numbers[row])
            kept = 1 + int((drawn == drafts[at]).long().cumprod(0).sum())
            tokens[row] = -1
            tokens[row, :kept] = torch.cat([drawn, bonus[row].to(drawn)])[:kept]
            generator.set_state(states[row])
            take(generator, kept)
        return tokens

    rejection_sampler.rejection_sample = rejection_sample
    try:
        yield
    finally:
        rejection_sampler.rejection_sample = theirs


class HeadModelRunner(GPUModelRunner):
    """What is added to the V1 runner of any device; `drafter` is a `MtpcProposer`."""

    def begin(self) -> None:
        """Called once vLLM has made the runner, which has no `min_p` and `logit_bias` where anything drafts."""
        processors = (kind(self.vllm_config, self.device, PIN_MEMORY) for kind in BUILTIN_LOGITS_PROCESSORS)
        self.input_batch.logitsprocs = LogitsProcessors(processors)

    def ready(self) -> None:
        """Called before the first request."""

    def _update_states(self, scheduler_output: Any) -> Any:
        """Also begins to compile the grammars that drafts of new requests are masked with."""
        if grammars := getattr(self.drafter, "grammars", None):
            for new in scheduler_output.scheduled_new_reqs:
                grammars.start(new.req_id, new.sampling_params)
        return super()._update_states(scheduler_output)

    @property
    def couples(self) -> bool:
        """Whether requests with a seed are coupled."""
        spec, sampler = self.speculative_config, self.sampler.topk_topp_sampler
        is_left = spec.verify == "rejection" or spec.rejection_sample_method != "standard"
        return not is_left and sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel

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
        is_coupled = generators and self.couples
        with coupled(generators, spec_decode_metadata.num_draft_tokens) if is_coupled else nullcontext():
            return super()._sample(logits, spec_decode_metadata)
