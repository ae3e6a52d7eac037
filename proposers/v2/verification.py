"""Sampling and verification on Model Runner V2: coupled for PTP and for requests with a seed, else by rejection.

Coupled requests get the tokens that plain vLLM samples: the token after position i is argmax_v log p(v) + g(seed, i, v)
with the processed distribution p and Gumbel noise g hashed from its arguments. Their drafts have the *same* noise,
argmax_v log q(v) + g(seed, i, v), and are accepted while they equal the token: with probability at least
(1 - TV(p, q)) / (1 + TV(p, q)) (Daliri, Musco and Suresh 2024, Gumbel coupling). The drafts of other requests take
noise of another stream (DRAFTING), which rejection sampling needs.

Pick, for PTP (Parallel Token Prediction): every output token is Pick(u, Q), the smallest token whose cumulative
probability under the processed distribution Q exceeds u, a hash of the request's seed and the position of the row that
gives Q. Drafts are accepted while they equal it. At temperature 0 the token is the argmax and u is 0.5.

Drafts that a grammar forbids and that were not masked (`grammar_masks.py`): vLLM 0.32 samples the token of the first
one from p, where it must come from max(p - q, 0). Here it is verified like any other draft, and never accepted because
its row is masked with the grammar.

A request with `mtpc_drafts` has as many rows as the others, so a batch keeps its CUDA graph. Its drafts beyond that
number are rejected whatever they are, and the token after the last verified one comes from p.

Fresh noise: vLLM 0.32 keys the noise of a token by seed and position, so a rejected draft is sampled again from the
same noise. In block and adaptive verification the accepted length depends on that noise, which biases the output. For
both, drafts, acceptance and resampling use a seed of the step, seed XOR (position of the step's first row << 32). vLLM
0.33 XORs the draft's number << 32 where it verifies blocks; there only the drafts take the step's seed: with both,
position 4 as draft 1 and 5 as draft 0 would collide (5 XOR 0 = 4 XOR 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import SpeculativeConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.kernels.couple import accept, warm_up
from vllm_mtpc.kernels.pick import select_tokens
from vllm_mtpc.kernels.uniform import uniform
from vllm_mtpc.proposers.options.request_options import max_drafts
from vllm_mtpc.proposers.options.versions import keys_noise_by_draft
from vllm_mtpc.proposers.worker.derive import extend_object

DRAFTING = 1 << 30  # added to a draft's position, as in vLLM: noise that verification does not read
GREEDY_U = 0.5  # inside the argmax's interval wherever the argmax has more than half of the mass


def needs_fresh_noise(spec_config: SpeculativeConfig) -> bool:
    """Whether drafts take noise that no earlier step has read."""
    return spec_config.rejection_sample_method == "block" or spec_config.enable_adaptive_verification


def is_stepped(spec_config: SpeculativeConfig) -> bool:
    """Whether verification takes such noise from seeds of the step."""
    return needs_fresh_noise(spec_config) and not keys_noise_by_draft()


def step_seeds(seeds: Tensor, anchor: Tensor) -> Tensor:
    """Return seeds [R], int64, of steps whose first rows are at positions anchor [R] >= 1."""
    return seeds ^ (anchor.long() << 32)


def u_of(seeds: Tensor, temperature: Tensor, slots: Tensor, pos: Tensor) -> Tensor:
    """Return u [T], float32, of the tokens after positions pos [T] of requests in slots [T]; seeds, ..: [slots]."""
    return torch.where(temperature[slots] == 0, GREEDY_U, uniform(seeds[slots], pos))


class CoupledStates(SamplingStates):
    """vLLM's states of requests, with what verification and drafts read of ours."""

    stream: UvaBackedTensor  # [max_num_reqs], int64, added to positions of drafts: DRAFTING, or 0 if coupled
    most: UvaBackedTensor  # [max_num_reqs], int32, drafts that are verified
    num_drafts: int  # K
    verify: str | None  # coupled requests: all ("coupled") or none ("rejection"); None: those with a seed

    @classmethod
    def extend(cls, states: SamplingStates, num_drafts: int, verify: str | None) -> CoupledStates:
        states = extend_object(states, cls)
        states.num_drafts, states.verify = num_drafts, verify
        states.most = UvaBackedTensor(states.max_num_reqs, dtype=torch.int32)
        states.stream = UvaBackedTensor(states.max_num_reqs, dtype=torch.int64)
        states.stream.np.fill(DRAFTING)
        states.stream.copy_to_uva()
        return states

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        is_coupled = sampling_params.seed is not None if self.verify is None else self.verify == "coupled"
        self.stream.np[req_idx] = 0 if is_coupled else DRAFTING
        self.most.np[req_idx] = max_drafts(sampling_params, self.num_drafts)
        return super().add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        self.stream.copy_to_uva()
        self.most.copy_to_uva()


class HeadSampler(RejectionSampler):
    """vLLM's rejection sampler, which verifies coupled requests by comparison of drafts and sampled tokens."""

    def __init__(self, sampler: Sampler, spec_config: SpeculativeConfig, device: torch.device) -> None:
        super().__init__(sampler, spec_config, device)
        self.seeds: Tensor | None = None  # [slots], of the step; None: those of the requests
        if is_stepped(spec_config):
            self.seeds = torch.zeros(sampler.sampling_states.max_num_reqs, dtype=torch.int64, device=device)

    @staticmethod
    def extend_sampler(sampler: Sampler, spec_config: SpeculativeConfig) -> Any:
        """Extend vLLM's plain sampler in place; return the part that the speculator reads."""
        return CoupledStates.extend(sampler.sampling_states, spec_config.num_speculative_tokens, spec_config.verify)

    @staticmethod
    def needs_plain_sampler(spec_config: SpeculativeConfig) -> str:
        """Return the options that no sampler but vLLM's plain one can serve; empty if they are not used."""
        is_used = is_stepped(spec_config) or spec_config.verify == "coupled"
        return "verify 'coupled', rejection_sample_method 'block' or enable_adaptive_verification" if is_used else ""

    def is_coupled(self, slots: np.ndarray) -> np.ndarray:
        return self.sampler.sampling_states.stream.np[slots] == 0

    def sample_tokens(self, processed_logits: Tensor, slots: Tensor, pos: Tensor) -> Tensor:
        """Sample tokens [T] of processed logits [T, V] at positions [T] as vLLM does without drafts."""
        states = self.sampler.sampling_states
        given = processed_logits, slots, states.temperature.gpu, states.seeds.gpu, pos  # as in Sampler._sample_random
        return gumbel_sample(*given, apply_temperature=False, is_drafting=False, use_fp64=self.sampler.use_fp64_gumbel)

    def __call__(
        self, logits: Tensor, input_batch: Any, draft_logits: Tensor | None = None, invalid_drafts: Tensor | None = None
    ) -> Any:
        if draft_logits is not None and invalid_drafts is not None:
            first, invalid_drafts = invalid_drafts, invalid_drafts.clone()
            invalid_drafts[1:] &= first[:-1]  # without the first of each run; a request's first row is always valid
        states = self.sampler.sampling_states
        if (states.most.np[input_batch.idx_mapping_np] < self.num_speculative_steps).any():
            surplus = input_batch.expanded_local_pos > states.most.gpu[input_batch.expanded_idx_mapping]
            invalid_drafts = surplus if invalid_drafts is None else surplus | invalid_drafts
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

    def _verify(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: Tensor,
        **new: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return processed logits [T, V], tokens [R, K + 1], int64, -1 after the last, and their numbers [R], int32.

        Args:
            logits, draft_logits: [T, V] of the rows of R requests, and [max_num_reqs, K, V], or None.
            draft_sampled, pos: [T], input token (of a request's rows but the first, a draft) and position of each row.
            cu_num_logits: [R + 1]; rows of request r are cu_num_logits[r] .. cu_num_logits[r + 1] - 1.
            idx_mapping, expanded_idx_mapping: request slots [R] and [T].
            verify_draft_sampled: [T], -1 where a draft cannot be accepted.
            new: parameters that a later vLLM adds, for the parent.
        """
        is_coupled, others = self.is_coupled(idx_mapping_np), None
        rows: dict[str, Any] = {  # of both methods of vLLM
            "pos": pos, "expanded_local_pos": expanded_local_pos, "expanded_idx_mapping": expanded_idx_mapping,
            "idx_mapping": idx_mapping, "idx_mapping_np": idx_mapping_np,
            "seq_lens_upper_bound_np": seq_lens_upper_bound_np,
        }  # fmt: skip
        if is_coupled.all():
            processed_logits = self.sampler.apply_sampling_params(logits, input_ids=draft_sampled, **rows)
        else:
            states = self.sampler.sampling_states
            own = states.seeds.gpu
            if self.seeds is not None:
                self.seeds[idx_mapping] = step_seeds(own[idx_mapping], pos[cu_num_logits[:-1]])
                states.seeds.gpu = self.seeds  # the parent reads them there
            try:
                found = super()._verify(
                    logits, draft_logits, draft_sampled=draft_sampled, cu_num_logits=cu_num_logits,
                    verify_draft_sampled=verify_draft_sampled, **rows, **new,
                )  # fmt: skip
            finally:
                states.seeds.gpu = own
            if not is_coupled.any():
                return found
            processed_logits, others = found[0], (states.stream.gpu[idx_mapping] == 0, *found[1:])
        tokens = self.sample_tokens(processed_logits, expanded_idx_mapping, pos)
        width = self.num_speculative_steps + 1
        return processed_logits, *accept(tokens, verify_draft_sampled, cu_num_logits, width, others)


class CoupledSampler(Sampler):
    """vLLM's sampler with Pick instead of its random draw."""

    def _sample_random(
        self,
        processed_logits: Tensor,
        expanded_idx_mapping: Tensor,
        idx_mapping_np: np.ndarray,
        pos: Tensor,
        top_k: Tensor | None,
        top_p: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        processed_logits = apply_top_k_top_p(processed_logits, top_k, top_p)
        seeds, temperature = self.sampling_states.seeds.gpu, self.sampling_states.temperature.gpu
        return select_tokens(processed_logits, expanded_idx_mapping, pos, seeds, temperature), processed_logits


class CoupledRejectionSampler(HeadSampler):
    """Accepts drafts while they are the tokens that `sampler` picks."""

    @staticmethod
    def extend_sampler(sampler: Sampler, spec_config: SpeculativeConfig) -> Sampler:
        HeadSampler.extend_sampler(sampler, spec_config)
        return extend_object(sampler, CoupledSampler)

    @staticmethod
    def needs_plain_sampler(spec_config: SpeculativeConfig) -> str:
        return "method ptp"

    def is_coupled(self, slots: np.ndarray) -> np.ndarray:
        return np.ones(len(slots), dtype=bool)

    def sample_tokens(self, processed_logits: Tensor, slots: Tensor, pos: Tensor) -> Tensor:
        states = self.sampler.sampling_states
        return select_tokens(processed_logits, slots, pos, states.seeds.gpu, states.temperature.gpu)


def with_sampler(
    kind: type[HeadSampler],
    base: type,
    spec_config: SpeculativeConfig,
    device: torch.device,
    on_ready: Callable[[Any], None],
) -> type:
    """Derive a ModelState class whose `custom_sampler` pairs vLLM's plain sampler with a `kind` of rejection sampler.

    on_ready: called with the result of `kind.extend_sampler`. Other samplers keep their own verification.
    """

    class ModelStateWithSampler(base):
        def custom_sampler(self, sampler: Any) -> Any:
            own = super().custom_sampler(sampler)
            if own is None and type(sampler) is Sampler:
                warm_up(spec_config.num_speculative_tokens + 1, device)
                on_ready(kind.extend_sampler(sampler, spec_config))
                return sampler, kind(sampler, spec_config, device)
            if options := kind.needs_plain_sampler(spec_config):
                name = type(sampler if own is None else own[0]).__name__
                remedy = "remove --watermark-config if it is given, else this option or method"
                raise ServeConfigError(f"{options} with {name}: only vLLM's plain Sampler can verify so; {remedy}")
            return own

    return ModelStateWithSampler
