"""Verification on Model Runner V2 without an engine: by Pick for PTP, by comparison for coupled requests, by rejection.

Tokens are those of decoding without drafts, and follow the target's distribution.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.watermarking.gpu_sampler import GPUWatermarkSampler
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from tests.support import forks
from tests.support.configs import spec_config
from tests.support.speculators import Setting, batch, made_heads, speculator
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.kernels.pick import naive as pick_naive
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.kernels.uniform import uniform
from vllm_mtpc.proposers.v1.proposer import draw_numbers, peek_numbers
from vllm_mtpc.proposers.v2 import verification
from vllm_mtpc.proposers.v2.verification import (
    DRAFTING,
    CoupledRejectionSampler,
    CoupledSampler,
    CoupledStates,
    Verifier,
    u_of,
    with_verifier,
)

torch.set_num_threads(1)
V, SLOTS, CPU = 11, 6, torch.device("cpu")
SIGNIFICANCE, CAUGHT = 1e-4, 1e-12  # seeds are fixed: a right sampler gives less than the first once in 10 000 seeds


@pytest.fixture(autouse=True)
def _no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)


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
    for name in ("any_greedy", "any_explicit_seed"):  # for which vLLM does not use it either
        monkeypatch.setattr(SamplingStates, name, lambda self, mapping: False)
    monkeypatch.setattr(Sampler, "use_xpu_sampler", False, raising=False)
    monkeypatch.setattr(Sampler, "logprobs_mode", "raw_logprobs", raising=False)

    def make(steps: int, temperature: tuple[float, ...] = (1.0,) * SLOTS, top_k: int = V, top_p: float = 1.0) -> Any:
        sampler = Sampler.__new__(Sampler)
        states = sampler.sampling_states = SamplingStates(SLOTS, V)
        for slot, t in enumerate(temperature):
            states.add_request(slot, SamplingParams(temperature=t, seed=100 + slot, top_k=top_k, top_p=top_p))
        states.apply_staged_writes()
        ready: list[Any] = []
        state = with_verifier(CoupledRejectionSampler, Base, spec_config(steps), CPU, ready.append)()
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
    monkeypatch.setattr(pick_naive, "uniform", lambda seed, pos: uniform(seed, pos) * 0.9)
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


DRAWN = torch.tensor([1, 2, 3, 4, 0, 1])  # the target's token at each row of the batch below


def made(verify: str | None, **options: Any) -> tuple[Any, CoupledStates]:
    """The rejection sampler of a runner with SLOTS requests, and their states; slots 1 and 2 have a seed."""
    spec = spec_config(2)
    vars(spec).update(verify=verify, **options)
    sampler = Sampler.__new__(Sampler)
    sampler.sampling_states, sampler.use_fp64_gumbel = SamplingStates(SLOTS, V), False
    found: list[CoupledStates] = []
    kept, rejection = with_verifier(Verifier, Base, spec, CPU, found.append)().custom_sampler(sampler)
    assert kept is sampler
    for slot in range(SLOTS):
        found[0].add_request(slot, SamplingParams(temperature=0.7, seed=slot if slot in (1, 2) else None))
    found[0].apply_staged_writes()
    return rejection, found[0]


@pytest.mark.parametrize(("verify", "coupled"), [(None, {1, 2}), ("coupled", set(range(SLOTS))), ("rejection", set())])
def test_requests_are_coupled_by_option_and_seed(verify: str | None, coupled: set[int]) -> None:
    _, states = made(verify)
    assert states.stream.gpu.tolist() == [0 if slot in coupled else DRAFTING for slot in range(SLOTS)]
    assert states.seeds.np[1] == 1 and states.temperature.gpu[0] == pytest.approx(0.7)  # and all of vLLM's own
    states.add_request(1, SamplingParams(temperature=1.0))
    states.apply_staged_writes()
    assert states.stream.gpu[1] == (0 if verify == "coupled" else DRAFTING), "another request took the slot"


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Verifies two requests of three rows; rejection would accept one token, 7. Returns the calls too."""
    asked: list[str] = []

    def rejection(self: Any, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        asked.append("rejection")
        return logits, torch.full((2, 3), 7), torch.ones(2, dtype=torch.int32)

    def gumbel_sample(logits: Tensor, slots: Tensor, temperature: Tensor, seeds: Tensor, pos: Tensor, **given: Any):
        asked.append("target")
        assert given == {"apply_temperature": False, "is_drafting": False, "use_fp64": False}
        assert pos.tolist() == [9, 10, 11, 4, 5, 6] and slots.tolist() == sorted(slots.tolist())
        return DRAWN

    monkeypatch.setattr(RejectionSampler, "_verify", rejection)
    monkeypatch.setattr(verification, "gumbel_sample", gumbel_sample)
    monkeypatch.setattr(Sampler, "apply_sampling_params", lambda self, logits, *args: logits)

    def verify(sampler: Any, slots: list[int], drafts: list[int]) -> tuple[list[str], list[list[int]], list[int]]:
        asked.clear()
        expanded = torch.tensor(slots).repeat_interleave(3)
        pos, begins = torch.tensor([9, 10, 11, 4, 5, 6]), torch.tensor([0, 3, 6], dtype=torch.int32)
        rows, mapping = torch.tensor(drafts), torch.tensor(slots)
        upper = np.zeros(2, dtype=np.int32)
        batch = (rows, pos, begins, mapping, mapping.numpy(), expanded, torch.arange(3).repeat(2), upper, rows)
        _, tokens, count = sampler._verify(torch.zeros(6, V), None, *batch)
        return list(asked), tokens.tolist(), count.tolist()

    return verify


@pytest.mark.parametrize(
    ("verify", "slots", "drafts", "calls", "tokens", "count"),
    [
        # rows of slot 1 draw 1, 2, 3: its drafts 1 and 4 give 1, 2; those of slot 2 draw 4, 0, 1, which its drafts are
        (None, [1, 2], [0, 1, 4, 0, 4, 0], ["target"], [[1, 2, -1], [4, 0, 1]], [2, 3]),
        (None, [0, 2], [0, 1, 4, 0, 4, 0], ["rejection", "target"], [[7, 7, 7], [4, 0, 1]], [1, 3]),
        (None, [0, 3], [0, 1, 4, 0, 4, 0], ["rejection"], [[7, 7, 7]] * 2, [1, 1]),
        # -1: a grammar forbids the draft, or there is none
        ("coupled", [1, 2], [0, 1, -1, 0, -1, 0], ["target"], [[1, 2, -1], [4, -1, -1]], [2, 1]),
    ],
    ids=["coupled", "one coupled", "none coupled", "forbidden drafts"],
)
def test_requests_are_verified_by_comparison_or_rejection(
    verified: Any, verify: str | None, slots: Any, drafts: Any, calls: list[str], tokens: Any, count: list[int]
) -> None:
    assert verified(made(verify)[0], slots, drafts) == (calls, tokens, count)


def test_seeds_of_a_step_are_for_rejection_only(verified: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.32's block verification."""
    monkeypatch.setattr(verification, "keys_noise_by_draft", lambda: False)
    sampler, states = made(None, rejection_sample_method="block")
    own, seen = states.seeds.gpu, []
    drawn = verification.gumbel_sample
    monkeypatch.setattr(
        verification, "gumbel_sample", lambda *args, **given: seen.append(args[3]) or drawn(*args, **given)
    )
    asked, tokens, _ = verified(sampler, [0, 2], [0, 1, 4, 0, 4, 0])
    assert asked == ["rejection", "target"] and tokens[1] == [4, 0, 1] and seen[0] is own


@pytest.mark.parametrize("is_own", [False, True], ids=["vLLM's", "of the model state"])
@pytest.mark.parametrize(
    ("verifier", "options", "said"),
    [
        (Verifier, {}, None),
        (Verifier, {"verify": "rejection"}, None),
        (Verifier, {"verify": "coupled"}, r"verify 'coupled'.* with GPUWatermarkSampler: only vLLM's plain Sampler"),
        (CoupledRejectionSampler, {}, r"GPUWatermarkSampler.*remove --watermark-config"),
    ],
)
def test_other_sampler_is_refused_if_the_plain_one_is_needed(
    verifier: type, options: dict[str, Any], said: str | None, is_own: bool
) -> None:
    spec, plain, other = spec_config(2), Sampler.__new__(Sampler), GPUWatermarkSampler.__new__(GPUWatermarkSampler)
    vars(spec).update({"verify": None, "rejection_sample_method": "standard", **options})
    kept = (other, None) if is_own else None
    own = type("Own", (Base,), {"custom_sampler": lambda self, sampler: kept})
    state = with_verifier(verifier, own, spec, CPU, lambda states: None)()
    with nullcontext() if said is None else pytest.raises(ServeConfigError, match=said):
        assert state.custom_sampler(plain if is_own else other) is kept
    assert type(other) is GPUWatermarkSampler  # untouched


def streams(setting: Setting) -> dict[str, Tensor]:
    """In a fork: drafts of requests, every other one coupled, and vLLM's own draws from their conditionals."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    with speculator(setting) as made:
        asked = batch(made, 4)
        slots, pos = asked["input_batch"].idx_mapping, asked["input_batch"].positions + 1
        stream = torch.where(torch.arange(made.max_num_reqs) % 2 == 0, 0, DRAFTING)
        made.states = SimpleNamespace(stream=SimpleNamespace(gpu=stream))
        found = {"is_coupled": stream[slots.long()] == 0, "temperature": asked["temperature"][slots.long()]}
        found["drafts"] = made.propose(**asked, num_speculative_tokens=1)[:, 0].clone()
        if made.draft_logits is None:
            return found
        log_q = made.draft_logits[slots.long(), 0].float()
        for name, is_drafting in (("target's", False), ("drafting", True)):
            given = (log_q, slots, asked["temperature"], asked["seeds"], pos)
            found[name] = gumbel_sample(*given, apply_temperature=True, is_drafting=is_drafting)
        made.states = None  # nothing is coupled
        found["alone"] = made.propose(**asked, num_speculative_tokens=1)[:, 0].clone()
        return found


def test_drafts_take_the_noise_of_their_verification(tmp_path: Path) -> None:
    """Coupled drafts take the target's noise, others that of vLLM's drafting stream."""
    folder, call = made_heads(tmp_path, 64, {"head": {}})["head"], "tests.proposers.test_verification:streams"
    found = forks.call("v2", call, Setting(folder, 8))
    is_coupled = found["is_coupled"]
    assert is_coupled.any() and not is_coupled.all()
    assert torch.equal(found["drafts"], torch.where(is_coupled, found["target's"], found["drafting"]))
    assert torch.equal(found["alone"], found["drafting"])
    assert not torch.equal(found["target's"], found["drafting"])
    every = forks.call("v2", call, Setting(folder, 8, options={"verify": "coupled"}))
    assert "drafting" not in every, "no conditionals are kept"
    assert torch.equal(every["drafts"], found["drafts"]), "and drafts are drawn all the same"


def test_numbers_of_v1_equal_those_of_vllm() -> None:
    """In the order of `TopKTopPSampler.forward_cpu`; numbers that were read ahead are drawn again."""
    one, other = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    drawn = [torch.randint(0, 2**31, (1,), generator=one, dtype=torch.long).item() for _ in range(9)]
    assert peek_numbers(other, 8).tolist() == drawn[:8]
    assert draw_numbers(other, 3).tolist() == drawn[:3] and peek_numbers(other, 2).tolist() == drawn[3:5]
    assert draw_numbers(other, 6).tolist() == drawn[3:]


def test_drafts_of_a_request_are_verified_up_to_those_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(RejectionSampler, "__call__", lambda self, *args: given.append(args[-1]))
    sampler, states = made(None)  # of 2 drafts
    for slot, drafts in enumerate((0, 1, 2)):
        states.add_request(slot, SamplingParams(extra_args={"mtpc_drafts": drafts}))
    states.apply_staged_writes()
    for slots, invalid in (([1, 2, 0], [[0, 0, 1], [0, 0, 0], [0, 1, 1]]), ([2, 2], None)):
        rows = torch.tensor(slots).repeat_interleave(3)
        batch = {"idx_mapping_np": np.array(slots), "expanded_idx_mapping": rows}
        batch["expanded_local_pos"] = torch.arange(3).repeat(len(slots))
        sampler(None, SimpleNamespace(**batch))
        found = given.pop()
        assert (found if found is None else found.view(-1, 3).int().tolist()) == invalid
