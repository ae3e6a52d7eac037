"""Verification by coupling: a request with a seed has the text that plain vLLM writes, whatever is drafted.

Algorithm: without drafts vLLM draws the token behind position i as the argmax over v of log p(v) + g(seed, i, v), with
p the processed distribution and g Gumbel noise hashed from its arguments. A coupled request's token at every verified
row is drawn in that way, by vLLM's own function; drafts are kept while they equal it. Its drafts are the argmax of
log q(v) + g(seed, i, v), the *same* noise, and so equal the target's token with probability at least
(1 - TV(p, q)) / (1 + TV(p, q)) (Daliri, Musco and Suresh 2024, Gumbel coupling); rejection keeps 1 - TV(p, q).

The text depends on no draft: not on where steps begin, the schedule, budgets, cuts, preemption or the batch.
Requests that are not coupled are verified by rejection beside it. Which request is which lies on the device, with its
seed; their drafts take noise of another stream (DRAFTING), which rejection needs.

`verify` in speculative_config: None couples requests with a seed, "coupled" every one, "rejection" none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from vllm.config import SpeculativeConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.kernels.couple import accept, warm_up
from vllm_mtpc.proposers.config.versions import keys_noise_by_draft
from vllm_mtpc.proposers.v2.grammar import ResidualRejectionSampler
from vllm_mtpc.proposers.v2.stepped import SteppedRejectionSampler, needs_fresh_noise

# Added to a draft's position: its noise is none that verification looks at. vLLM's own drafts add the same.
DRAFTING = 1 << 30

Verify = Literal["coupled", "rejection"] | None


class CoupledStates(SamplingStates):
    """vLLM's states of requests, which also hold what is added to the positions of their drafts: 0 of coupled ones."""

    stream: UvaBackedTensor  # [max_num_reqs] int64
    verify: Verify

    @classmethod
    def of(cls, states: SamplingStates, verify: Verify) -> CoupledStates:
        """The same object, with one more state."""
        states.__class__, states.verify = cls, verify
        states.stream = UvaBackedTensor(states.max_num_reqs, dtype=torch.int64)
        states.stream.np.fill(DRAFTING)
        states.stream.copy_to_uva()
        return states

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        is_coupled = sampling_params.seed is not None if self.verify is None else self.verify == "coupled"
        self.stream.np[req_idx] = 0 if is_coupled else DRAFTING
        return super().add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        self.stream.copy_to_uva()


class Coupling(RejectionSampler):
    """A rejection sampler, mixed in before another one, which verifies coupled requests by comparison."""

    def is_coupled(self, slots: np.ndarray) -> np.ndarray:
        """Which of the requests in slots [R] are."""
        return self.sampler.sampling_states.stream.np[slots] == 0

    def tokens_of(self, processed_logits: Tensor, slots: Tensor, pos: Tensor) -> Tensor:
        """Tokens [T] of processed logits [T, V] at positions [T] in request slots [T], as vLLM says without drafts."""
        states = self.sampler.sampling_states
        return gumbel_sample(  # as Sampler._sample_random calls it
            processed_logits,
            slots,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )

    def _verify(
        self,
        logits: Tensor,  # [T, V]
        draft_logits: Tensor | None,
        draft_sampled: Tensor,  # [T] input token of each row: behind a request's first, its drafts
        pos: Tensor,  # [T]
        cu_num_logits: Tensor,  # [R + 1] rows of request r are cu_num_logits[r] .. cu_num_logits[r + 1] - 1
        idx_mapping: Tensor,  # [R] slots
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: Tensor,  # [T] slots
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: Tensor,  # [T] with -1 where a draft cannot be kept
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Processed logits [T, V], tokens [R, K + 1] int64 (-1 behind the last), number of tokens [R] int32."""
        is_coupled, others = self.is_coupled(idx_mapping_np), None
        more = (expanded_local_pos, seq_lens_upper_bound_np)
        if not is_coupled.all():
            rows = (draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np, expanded_idx_mapping, *more)
            found = super()._verify(logits, draft_logits, *rows, verify_draft_sampled, *args, **kwargs)
            if not is_coupled.any():
                return found
            processed_logits, others = found[0], (self.sampler.sampling_states.stream.gpu[idx_mapping] == 0, *found[1:])
        else:
            given = (expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, draft_sampled, *more)
            processed_logits = self.sampler.apply_sampling_params(logits, *given)
        tokens = self.tokens_of(processed_logits, expanded_idx_mapping, pos)
        width = self.num_speculative_steps + 1
        return processed_logits, *accept(tokens, verify_draft_sampled, cu_num_logits, width, others)


class CoupledResidualSampler(Coupling, ResidualRejectionSampler):
    pass


class CoupledSteppedSampler(Coupling, SteppedRejectionSampler):
    """Only what is verified by rejection needs noise of its own in every step."""


def with_verification(
    base: type, spec_config: SpeculativeConfig, device: torch.device, on_states: Callable[[CoupledStates], None]
) -> type:
    """`base`, a ModelState class, whose rejection sampler couples requests with a seed.

    on_states is called with the states of requests. Where another sampler than vLLM's plain one is in use it keeps its
    own verification; raises ServeConfigError where that would not do what was asked for.
    """
    is_stepped = needs_fresh_noise(spec_config) and not keys_noise_by_draft()
    kind = CoupledSteppedSampler if is_stepped else CoupledResidualSampler

    def make(sampler: Sampler) -> tuple[Sampler, RejectionSampler]:
        warm_up(spec_config.num_speculative_tokens + 1, device)
        on_states(CoupledStates.of(sampler.sampling_states, spec_config.verify))
        return sampler, kind(sampler, spec_config, device)

    def refuse(name: str) -> None:
        if is_stepped or spec_config.verify == "coupled":
            raise ServeConfigError(
                f"verify 'coupled', rejection_sample_method 'block' or enable_adaptive_verification with {name}: only "
                "vLLM's plain Sampler can be given such a verifier; drop these options"
            )

    return with_samplers(base, make, refuse)


def with_samplers(
    base: type, make: Callable[[Sampler], tuple[Sampler, RejectionSampler]], refuse: Callable[[str], None]
) -> type:
    """`base`, a ModelState class, whose `custom_sampler` hands the runner what `make` makes of vLLM's plain sampler.

    Where another sampler is in use it stays, unless `refuse` raises at its name.
    """

    class ModelStateWithSamplers(base):
        def custom_sampler(self, sampler: Any) -> Any:
            own = super().custom_sampler(sampler)
            if own is None and type(sampler) is Sampler:
                return make(sampler)
            refuse(type(sampler if own is None else own[0]).__name__)
            return own

    return ModelStateWithSamplers
