"""Sampling and verification on Model Runner V2: by coupling for requests with a seed and for PTP, else by rejection.

Coupling: a request with a seed has the text that plain vLLM writes, whatever is drafted. Without drafts vLLM draws the
token behind position i as the argmax over v of log p(v) + g(seed, i, v), with p the processed distribution and g Gumbel
noise hashed from its arguments. A coupled request's token at every verified row is drawn in that way, by vLLM's own
function; drafts are kept while they equal it. Its drafts are the argmax of log q(v) + g(seed, i, v), the *same* noise,
and so equal the target's token with probability at least (1 - TV(p, q)) / (1 + TV(p, q)) (Daliri, Musco and Suresh
2024, Gumbel coupling); rejection keeps 1 - TV(p, q). The text depends on no draft: not on where steps begin, the
schedule, budgets, cuts, preemption or the batch. Which request is coupled lies on the device, with its seed; drafts of
the others take noise of another stream (DRAFTING), which rejection needs.

Pick, for drafts that know the verifier's random numbers (Parallel Token Prediction): every output token is Pick(u, Q),
the smallest token whose cumulative probability under the target's processed distribution Q exceeds u, a hash of the
request's seed and the position of the row that gives Q. Drafts are accepted while they equal what is picked. So the
tokens are those of decoding without drafts, whatever the drafts say, the batch holds, or steps divide; the drafter who
computes the same u can be right always. At temperature 0 the token is the argmax, and u, which drafters read all the
same, is 0.5. Fused samplers are never used: they draw numbers of their own.

Forbidden drafts, where they are not masked with their grammar (`grammar.py`): vLLM 0.32 marks the first one and all
behind it as -1, and takes the token in the first one's place from the target's distribution p. That is biased: the
draft came from q, it is rejected because p is 0 there, so the token must come from max(p - q, 0). (PTP's drafts and
argmax drafts have no q.) Here the first one is verified like any other draft: its row is masked with the grammar, so it
is never accepted. What is behind it stays -1 and is not reached.

Noise that no earlier step has looked at: vLLM 0.32 keys the noise of a token by the request's seed and the token's
position; a draft that is thrown away is drawn again from the same noise. The standard rule may do so: it has not looked
at anything behind the first rejection. Block verification has (how much of a block is kept depends on its last draft),
and adaptive verification has (a budget follows from the last step's confidences); what is kept then no longer has the
target's distribution. Here the seed of a step is seed XOR (position of the step's first row << 32), for drafting,
acceptance and resampling. A request's steps start at different positions, so no noise is used twice. vLLM 0.33 does the
same where it verifies blocks: it XORs the draft's number << 32, and position and number give the step. There only our
drafts, in which vLLM has no part, take a step's seeds: with both, position 4 as draft 1 and 5 as draft 0 would meet
(5 XOR 0 = 4 XOR 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

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
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.kernels.uniform import uniform
from vllm_mtpc.proposers.config.versions import TESTED, keys_noise_by_draft, vllm_version

# Added to a draft's position: its noise is none that verification looks at. vLLM's own drafts add the same.
DRAFTING = 1 << 30
# Tokens [2] of vLLM's noise alone, over 1,024 tokens, at two positions of two seeds; by use_fp64
NOISE_SEEDS, NOISE_POSITIONS = (7, (5 << 32) + 1), (3, 1 << 20)
NOISE_TOKENS = {False: [358, 229], True: [886, 608]}
GREEDY_U = 0.5  # inside the argmax's interval wherever the argmax has more than half of the mass

Verify = Literal["coupled", "rejection"] | None  # which requests are coupled: every one, none; None: those with a seed


def needs_fresh_noise(spec_config: SpeculativeConfig) -> bool:
    """Whether drafts take noise that no earlier step has looked at."""
    return spec_config.rejection_sample_method == "block" or spec_config.enable_adaptive_verification


def is_stepped(spec_config: SpeculativeConfig) -> bool:
    """Whether verification does."""
    return needs_fresh_noise(spec_config) and not keys_noise_by_draft()


def step_seeds(seeds: Tensor, anchor: Tensor) -> Tensor:
    """Seeds [R] int64 of the steps whose first rows are at positions anchor[R] (at least 1: a prompt comes before)."""
    return seeds ^ (anchor.long() << 32)


def behind_the_first(invalid: Tensor) -> Tensor:
    """`invalid` [T] without the first row of each run: a request's rows begin with one that is valid."""
    kept = invalid.clone()
    kept[1:] &= invalid[:-1]
    return kept


def u_of(seeds: Tensor, temperature: Tensor, slots: Tensor, pos: Tensor) -> Tensor:
    """u [T] of the tokens that follow positions pos[T], in the requests at slots[T] of seeds and temperature.

    Drafter and verifier both take it from here.
    """
    return torch.where(temperature[slots] == 0, GREEDY_U, uniform(seeds[slots], pos))


def choose(processed_logits: Tensor, states: SamplingStates, slots: Tensor, pos: Tensor) -> Tensor:
    """Tokens [T] int64: Pick from processed_logits [T, V], argmax at temperature 0."""
    logits = processed_logits.float()  # vLLM hands back the model's own dtype where nothing is to be processed
    temperature = states.temperature.gpu
    picked = pick(logits, u_of(states.seeds.gpu, temperature, slots, pos))
    return torch.where(temperature[slots] == 0, logits.argmax(dim=-1), picked)


def check_noise(device: torch.device, use_fp64: bool) -> None:
    """Compare vLLM's noise for two tokens with what it was where coupled drafts were tested.

    Raises:
        ServeConfigError: vLLM has changed the keys of its noise.
    """
    seeds, pos = torch.tensor([NOISE_SEEDS, NOISE_POSITIONS], device=device)
    slots, flat = torch.arange(2, device=device), torch.zeros(2, 1024, device=device)
    how = {"apply_temperature": False, "is_drafting": False, "use_fp64": use_fp64}
    found = gumbel_sample(flat, slots, torch.ones(2, device=device), seeds, pos, **how)
    if found.tolist() != NOISE_TOKENS[use_fp64]:
        raise ServeConfigError(
            f"verify='coupled': vLLM {vllm_version()} draws other noise than the versions it was tested with "
            f"({', '.join(TESTED)}); allowed here: 'rejection'; drop it, or install one of them"
        )


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


class Verifier(RejectionSampler):
    """vLLM's verification; coupled requests are verified by comparison."""

    def __init__(self, sampler: Sampler, spec_config: SpeculativeConfig, device: torch.device) -> None:
        super().__init__(sampler, spec_config, device)
        if spec_config.verify == "coupled":
            check_noise(device, sampler.use_fp64_gumbel)
        self.seeds: Tensor | None = None  # [slots] of the step; None: those of the requests
        if is_stepped(spec_config):
            self.seeds = torch.zeros(sampler.sampling_states.max_num_reqs, dtype=torch.int64, device=device)

    @staticmethod
    def prepared(sampler: Sampler, spec_config: SpeculativeConfig) -> Any:
        """What the speculator reads of vLLM's plain sampler, which is changed in place: the states of requests."""
        return CoupledStates.of(sampler.sampling_states, spec_config.verify)

    @staticmethod
    def refuse(name: str, spec_config: SpeculativeConfig) -> None:
        """Raise ServeConfigError where another sampler, of this name, would not do what was asked for."""
        if is_stepped(spec_config) or spec_config.verify == "coupled":
            raise ServeConfigError(
                f"verify 'coupled', rejection_sample_method 'block' or enable_adaptive_verification with {name}: only "
                "vLLM's plain Sampler can be given such a verifier; drop these options"
            )

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

    def __call__(
        self, logits: Tensor, input_batch: Any, draft_logits: Tensor | None = None, invalid_drafts: Tensor | None = None
    ) -> Any:
        """As its parent; a forbidden draft is replaced from the residual distribution."""
        if draft_logits is not None and invalid_drafts is not None:
            invalid_drafts = behind_the_first(invalid_drafts)
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

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
        if is_coupled.all():
            given = (expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, draft_sampled, *more)
            processed_logits = self.sampler.apply_sampling_params(logits, *given)
        else:
            states = self.sampler.sampling_states
            own = states.seeds.gpu
            if self.seeds is not None:
                self.seeds[idx_mapping] = step_seeds(own[idx_mapping], pos[cu_num_logits[:-1]])
                states.seeds.gpu = self.seeds  # from where its parent reads them
            rows = (draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np, expanded_idx_mapping, *more)
            try:
                found = super()._verify(logits, draft_logits, *rows, verify_draft_sampled, *args, **kwargs)
            finally:
                states.seeds.gpu = own
            if not is_coupled.any():
                return found
            processed_logits, others = found[0], (states.stream.gpu[idx_mapping] == 0, *found[1:])
        tokens = self.tokens_of(processed_logits, expanded_idx_mapping, pos)
        width = self.num_speculative_steps + 1
        return processed_logits, *accept(tokens, verify_draft_sampled, cu_num_logits, width, others)


class CoupledSampler(Sampler):
    """vLLM's sampler, with Pick in the place of its random draw."""

    def _sample_random(
        self,
        processed_logits: Tensor,  # [T, V], before top-k and top-p
        expanded_idx_mapping: Tensor,  # [T] request slots
        idx_mapping_np: np.ndarray,
        pos: Tensor,  # [T]
        top_k: Tensor | None,
        top_p: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        processed_logits = apply_top_k_top_p(processed_logits, top_k, top_p)
        return choose(processed_logits, self.sampling_states, expanded_idx_mapping, pos), processed_logits


class CoupledRejectionSampler(Verifier):
    """Accepts drafts while they are the tokens that `sampler` picks."""

    def __init__(self, sampler: CoupledSampler, spec_config: SpeculativeConfig, device: torch.device) -> None:
        if not isinstance(sampler, CoupledSampler):
            self.refuse(type(sampler).__name__, spec_config)
        super().__init__(sampler, spec_config, device)

    @staticmethod
    def prepared(sampler: Sampler, spec_config: SpeculativeConfig) -> CoupledSampler:
        sampler.__class__ = CoupledSampler
        return sampler

    @staticmethod
    def refuse(name: str, spec_config: SpeculativeConfig) -> None:
        remedy = "remove --watermark-config" if "Watermark" in name else "use a target without a sampler of its own"
        raise ServeConfigError(
            f"method ptp with {name}: only vLLM's plain Sampler can be coupled to the drafts; {remedy}, or another "
            "method"
        )

    def is_coupled(self, slots: np.ndarray) -> np.ndarray:
        return np.ones(len(slots), dtype=bool)

    def tokens_of(self, processed_logits: Tensor, slots: Tensor, pos: Tensor) -> Tensor:
        return choose(processed_logits, self.sampler.sampling_states, slots, pos)


def with_verifier(
    kind: type[Verifier],
    base: type,
    spec_config: SpeculativeConfig,
    device: torch.device,
    on_ready: Callable[[Any], None],
) -> type:
    """`base`, a ModelState class, whose `custom_sampler` gives vLLM's plain sampler a rejection sampler of ours.

    on_ready is called with what the speculator reads of it. Where another sampler is in use it keeps its own
    verification; raises ServeConfigError where that would not do what was asked for.
    """

    class ModelStateWithVerifier(base):
        def custom_sampler(self, sampler: Any) -> Any:
            own = super().custom_sampler(sampler)
            if own is None and type(sampler) is Sampler:
                warm_up(spec_config.num_speculative_tokens + 1, device)
                on_ready(kind.prepared(sampler, spec_config))
                return sampler, kind(sampler, spec_config, device)
            kind.refuse(type(sampler if own is None else own[0]).__name__, spec_config)
            return own

    return ModelStateWithVerifier
