"""Coupled verification without an engine: coupled requests, requests verified by rejection, refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from tests.support import forks
from tests.support.configs import spec_config
from tests.support.speculators import Setting, batch, made_heads, speculator
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.proposers.v2 import verification
from vllm_mtpc.proposers.v2.verification import DRAFTING, CoupledStates, Verifier, with_verifier

V, SLOTS, CPU = 5, 4, torch.device("cpu")
DRAWN = torch.tensor([1, 2, 3, 4, 0, 1])  # the target's token at each row of the batch below


@pytest.fixture(autouse=True)
def _no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)


class Base:
    """A ModelState that keeps vLLM's sampler."""

    def custom_sampler(self, sampler: Any) -> Any:
        return None


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


@pytest.mark.parametrize(("verify", "coupled"), [(None, {1, 2}), ("coupled", {0, 1, 2, 3}), ("rejection", set())])
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


def test_other_sampler_is_refused_if_an_option_needs_the_plain_one() -> None:
    spec = spec_config(2)

    def asked(**options: Any) -> Any:
        vars(spec).update({"verify": None, "rejection_sample_method": "standard", **options})
        return with_verifier(Verifier, Base, spec, CPU, lambda states: None)().custom_sampler(SimpleNamespace())

    assert asked() is None and asked(verify="rejection") is None
    with pytest.raises(ServeConfigError, match=r"verify 'coupled'.* with SimpleNamespace: only vLLM's plain Sampler"):
        asked(verify="coupled")


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
    folder = made_heads(tmp_path, 64, {"head": {}})["head"]
    found = forks.call("v2", "tests.proposers.test_seeded:streams", Setting(folder, 8))
    is_coupled = found["is_coupled"]
    assert is_coupled.any() and not is_coupled.all()
    assert torch.equal(found["drafts"], torch.where(is_coupled, found["target's"], found["drafting"]))
    assert torch.equal(found["alone"], found["drafting"])
    assert not torch.equal(found["target's"], found["drafting"])
    every = forks.call("v2", "tests.proposers.test_seeded:streams", Setting(folder, 8, options={"verify": "coupled"}))
    assert "drafting" not in every, "no conditionals are kept"
    assert torch.equal(every["drafts"], found["drafts"]), "and drafts are drawn all the same"


def test_numbers_of_v1_equal_those_of_vllm() -> None:
    """In the order of `TopKTopPSampler.forward_cpu`; numbers that were read ahead are drawn again."""
    from vllm_mtpc.proposers.v1.proposer import draw_numbers, peek_numbers

    one, other = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    drawn = [torch.randint(0, 2**31, (1,), generator=one, dtype=torch.long).item() for _ in range(9)]
    assert peek_numbers(other, 8).tolist() == drawn[:8]
    assert draw_numbers(other, 3).tolist() == drawn[:3] and peek_numbers(other, 2).tolist() == drawn[3:5]
    assert draw_numbers(other, 6).tolist() == drawn[3:]
