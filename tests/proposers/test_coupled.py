"""Verification by Pick: the tokens are those of decoding without drafts, and follow the target's distribution."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from tests.support.configs import spec_config
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.kernels.uniform import uniform
from vllm_mtpc.proposers.v2 import verification
from vllm_mtpc.proposers.v2.verification import CoupledRejectionSampler, CoupledSampler, u_of, with_verifier

with_coupled_sampler = partial(with_verifier, CoupledRejectionSampler)
torch.set_num_threads(1)
V, SLOTS, CPU = 11, 6, torch.device("cpu")
SIGNIFICANCE, CAUGHT = 1e-4, 1e-12  # seeds are fixed: a right sampler gives less than the first once in 10 000 seeds


class States(SimpleNamespace):
    """The parts of vLLM's SamplingStates that the samplers read."""

    vocab_size = V
    get_top_k_top_p = SamplingStates.get_top_k_top_p
    any_greedy = any_explicit_seed = lambda self, mapping: False

    def __init__(self, **given: list[float]) -> None:
        tensors = {name: torch.tensor(values) for name, values in given.items()}
        super().__init__(**{name: SimpleNamespace(gpu=x, np=x.numpy()) for name, x in tensors.items()})


class Base:
    """A ModelState that keeps vLLM's sampler."""

    def custom_sampler(self, sampler: Any) -> None:
        return None


def apply_sampling_params(
    self: Any, logits: Tensor, slots: Tensor, *args: Any, skip_top_k_top_p: bool = False
) -> Tensor:
    """vLLM's function without its temperature kernel."""
    states = self.sampling_states
    temperature = states.temperature.gpu
    if ((temperature == 1) | (temperature == 0)).all() and (states.top_k.gpu == V).all():
        return logits
    temperature = temperature[slots]
    logits = logits.float() / torch.where(temperature == 0, 1.0, temperature)[:, None]
    if skip_top_k_top_p:
        return logits
    return topk_topp_sampler.apply_top_k_top_p(logits, states.top_k.gpu[slots], states.top_p.gpu[slots])


@pytest.fixture(name="samplers")
def fixture_samplers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the samplers that a model state gives to the runner, without what runs on a GPU only."""
    monkeypatch.setattr(topk_topp_sampler, "HAS_TRITON", False)  # vLLM's PyTorch version
    monkeypatch.setattr(Sampler, "apply_sampling_params", apply_sampling_params)
    monkeypatch.setattr(Sampler, "use_flashinfer", True, raising=False)  # must not be used: it draws its own numbers
    monkeypatch.setattr(Sampler, "use_xpu_sampler", False, raising=False)
    monkeypatch.setattr(Sampler, "logprobs_mode", "raw_logprobs", raising=False)

    def make(steps: int, temperature: tuple[float, ...] = (1.0,) * SLOTS, top_k: int = V, top_p: float = 1.0) -> Any:
        sampler = Sampler.__new__(Sampler)
        sampler.sampling_states = States(
            temperature=list(temperature),
            seeds=[100 + slot for slot in range(SLOTS)],
            top_k=[V if t == 0 else top_k for t in temperature],
            top_p=[1.0 if t == 0 else top_p for t in temperature],
        )
        ready: list[Any] = []
        state = with_coupled_sampler(Base, spec_config(steps), CPU, ready.append)()
        ours, rejection = state.custom_sampler(sampler)
        assert isinstance(state, Base) and ready == [sampler] and ours is sampler is rejection.sampler
        return ours, rejection

    return make


class Batch:
    """Rows of requests with `drafts` each, in slots `slots`, the first row of request r at position starts[r].

    Logits are a function of slot and position.
    """

    def __init__(self, drafts: list[int], slots: list[int], starts: list[int], dtype: torch.dtype = torch.float32):
        rows = torch.tensor(drafts) + 1
        self.cu = torch.cat([torch.zeros(1, dtype=torch.long), rows.cumsum(0)]).int()
        self.slots = torch.tensor(slots)
        self.expanded = self.slots.repeat_interleave(rows)
        self.local = torch.cat([torch.arange(n) for n in rows.tolist()])
        self.pos = torch.tensor(starts).repeat_interleave(rows) + self.local
        self.logits = torch.stack([logits_at(s, p) for s, p in zip(self.expanded, self.pos, strict=True)]).to(dtype)

    def verify(self, sampler: CoupledRejectionSampler, inputs: Tensor, forbidden: Tensor | None = None) -> Any:
        """`inputs`: input token of each row. An argument of a later vLLM is passed on."""
        masked = inputs if forbidden is None else inputs.masked_fill(forbidden, -1)
        slots = (self.slots, self.slots.numpy(), self.expanded, self.local, np.zeros(len(self.slots), dtype=np.int32))
        return sampler._verify(self.logits.clone(), None, inputs, self.pos, self.cu, *slots, masked, new=1)

    def sample(self, sampler: CoupledSampler) -> Tensor:
        """Tokens [T] of the same rows without drafts, each a request."""
        slots = (self.expanded, self.expanded, self.expanded.numpy(), self.pos)
        rest = (torch.zeros_like(self.pos), torch.zeros_like(self.local), np.zeros(len(self.pos), dtype=np.int32))
        return sampler.sample(self.logits.clone(), *slots, *rest)[0]

    def following(self, tokens: Tensor) -> Tensor:
        """Inputs with right drafts only: row j + 1 of a request carries the token of row j."""
        inputs = tokens.roll(1)
        inputs[self.local == 0] = 0
        return inputs.int()


def logits_at(slot: int, pos: int) -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(1000 * int(slot) + int(pos))) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k, top_p", [(V, 1.0), (5, 1.0), (6, 0.8)])
def test_drafts_do_not_change_the_tokens(samplers: Any, top_k: int, top_p: float, dtype: torch.dtype) -> None:
    """Greedy and sampled requests of one batch: drafts before the first wrong one are accepted."""
    temperature = (0.0, 1.0, 0.7, 0.0, 1.3, 1.0)
    sampler, rejection = samplers(6, temperature, top_k, top_p)
    batch = Batch([6, 0, 2, 6, 1, 6], [4, 1, 0, 5, 3, 2], [0, 9, 31, 4, 12, 50], dtype)
    tokens = batch.sample(sampler)
    generator = torch.Generator().manual_seed(1)
    accepted = set()
    for _ in range(60):
        keep = torch.rand(len(tokens), generator=generator) < 0.7
        inputs = torch.where(keep, batch.following(tokens), torch.randint(V, (len(tokens),), generator=generator).int())
        _, sampled, num_sampled = batch.verify(rejection, inputs)
        assert sampled.shape == (6, 7) and (sampled.dtype, num_sampled.dtype) == (torch.int64, torch.int32)
        for request, (row, count) in enumerate(zip(sampled, num_sampled.tolist(), strict=True)):
            first, end = batch.cu[request : request + 2].tolist()
            assert row[:count].tolist() == tokens[first : first + count].tolist()
            assert (row[count:] == -1).all()
            right = (inputs[first + 1 : end] == tokens[first : end - 1]).long().cumprod(0).sum()
            assert 1 <= count == right + 1 <= end - first
            accepted.add(count)
    assert accepted == set(range(1, 8))
    greedy = [row for row, slot in enumerate(batch.expanded.tolist()) if temperature[slot] == 0]
    assert tokens[greedy].tolist() == batch.logits[greedy].argmax(-1).tolist()


def test_drafts_picked_with_the_same_u_are_all_accepted(samplers: Any) -> None:
    _, rejection = samplers(4)
    batch = Batch([4] * 5, list(range(5)), [3, 1, 4, 1, 5])
    states = rejection.sampler.sampling_states
    u = u_of(states.seeds.gpu, states.temperature.gpu, batch.expanded, batch.pos)
    processed, _, num_sampled = batch.verify(rejection, batch.following(pick(batch.logits, u)))
    assert num_sampled.tolist() == [5] * 5 and torch.equal(processed, batch.logits)


@pytest.mark.feature(
    "sampling under a grammar", "exact", "ptp on V2", why="drafts have no distribution: the token is picked"
)
def test_forbidden_draft_is_rejected_even_if_picked(samplers: Any) -> None:
    sampler, rejection = samplers(3)
    batch = Batch([3, 3], [0, 1], [5, 9])
    tokens = batch.sample(sampler)
    inputs = batch.following(tokens)
    forbidden = torch.zeros_like(inputs, dtype=torch.bool)
    forbidden[2] = True  # the second draft of the first request
    _, sampled, num_sampled = batch.verify(rejection, inputs, forbidden)
    assert num_sampled.tolist() == [2, 4] and sampled[0, :2].tolist() == tokens[:2].tolist()
    _, sampled, num_sampled = batch.verify(rejection, inputs.new_full(inputs.shape, -1))
    assert num_sampled.tolist() == [1, 1] and (sampled[:, 1:] == -1).all()


def test_tokens_follow_the_target_distribution(samplers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 000 tokens with right and wrong drafts; a biased u is found."""
    requests, temperature = 10_000, 0.8
    _, rejection = samplers(1, (temperature,) * SLOTS, V - 1)
    logits = logits_at(0, 0)
    logits[3] = logits.amin() - 1  # outside the top 10
    batch = Batch([1], [0], [0])
    batch.cu = torch.arange(requests + 1).int() * 2
    batch.slots = torch.zeros(requests, dtype=torch.long)
    batch.expanded, batch.local = batch.slots.repeat(2), torch.arange(2).repeat(requests)
    batch.pos = torch.arange(2 * requests)
    batch.logits = logits.expand(2 * requests, -1)
    inputs = torch.randint(V, (2 * requests,), generator=torch.Generator().manual_seed(2))
    kept = torch.arange(V) != 3
    wanted = (logits / temperature).double()[kept].softmax(0).numpy()

    def p_value() -> float:
        _, sampled, _ = batch.verify(rejection, inputs)
        counts = torch.bincount(sampled[sampled >= 0], minlength=V)
        assert counts[3] == 0
        return float(chisquare(counts[kept].numpy(), wanted * int(counts.sum())).pvalue)

    assert p_value() > SIGNIFICANCE
    monkeypatch.setattr(verification, "uniform", lambda seed, pos: uniform(seed, pos) * 0.9)
    assert p_value() < CAUGHT


def test_u_depends_on_seed_and_position() -> None:
    """0.5 for greedy requests."""
    seeds, temperature = torch.tensor([3, -7, 2**40]), torch.tensor([1.0, 0.0, 0.3])
    slots, pos = torch.tensor([2, 0, 1, 2], dtype=torch.int32), torch.tensor([5, 5, 5, 6])
    wanted = uniform(seeds[[2, 0, 1, 2]], pos)
    wanted[2] = 0.5
    found = u_of(seeds, temperature, slots, pos)
    assert found.dtype == torch.float32 and torch.equal(found, wanted)
    assert len(set(found.tolist())) == 4


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (CoupledSampler._sample_random, Sampler._sample_random),
        (CoupledRejectionSampler._verify, RejectionSampler._verify),
    ],
)
def test_arguments_are_those_of_the_installed_vllm(ours: Any, theirs: Any) -> None:
    named = [p.name for p in inspect.signature(ours).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(inspect.signature(theirs).parameters)[: len(named)] == named
    assert list(inspect.signature(ModelState.custom_sampler).parameters) == ["self", "sampler"]


def test_other_sampler_is_refused() -> None:
    from vllm.v1.watermarking.gpu_sampler import GPUWatermarkSampler

    class Own(Base):
        def custom_sampler(self, sampler: Any) -> tuple[Any, None]:
            return SimpleNamespace(), None

    watermark = GPUWatermarkSampler.__new__(GPUWatermarkSampler)
    with pytest.raises(ServeConfigError, match=r"GPUWatermarkSampler.*remove --watermark-config"):
        with_coupled_sampler(Base, SimpleNamespace(), CPU, print)().custom_sampler(watermark)
    assert type(watermark) is GPUWatermarkSampler  # untouched
    with pytest.raises(ServeConfigError, match="SimpleNamespace"):
        with_coupled_sampler(Own, SimpleNamespace(), CPU, print)().custom_sampler(Sampler.__new__(Sampler))
