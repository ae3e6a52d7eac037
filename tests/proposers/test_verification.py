"""Verification on Model Runner V2 without an engine: which requests are coupled, how many drafts are verified.

`tests/e2e/test_distribution.py`, `test_seeds.py`, `test_grammar.py` and `test_ptp.py` compare the text.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.watermarking.gpu_sampler import GPUWatermarkSampler
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from tests.support.configs import spec_config
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.proposers.v2.verification import (
    CoupledRejectionSampler,
    CoupledStates,
    HeadSampler,
    step_seeds,
    with_sampler,
)

torch.set_num_threads(1)
V, SLOTS, CPU = 11, 6, torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)


class Base:
    """A ModelState that keeps vLLM's sampler."""

    def custom_sampler(self, sampler: Any) -> None:
        return None


def made(verify: str | None) -> tuple[Any, CoupledStates]:
    """The rejection sampler of a runner with SLOTS requests, and their states; slots 1 and 2 have a seed."""
    spec = spec_config(2)
    vars(spec).update(verify=verify)
    sampler = Sampler.__new__(Sampler)
    sampler.sampling_states, sampler.use_fp64_gumbel = SamplingStates(SLOTS, V), False
    kept, rejection = with_sampler(HeadSampler, Base, spec, CPU, lambda ready: None)().custom_sampler(sampler)
    assert kept is sampler
    states = sampler.sampling_states
    for slot in range(SLOTS):
        states.add_request(slot, SamplingParams(temperature=0.7, seed=slot if slot in (1, 2) else None))
    states.apply_staged_writes()
    return rejection, states


@pytest.mark.parametrize("is_own", [False, True], ids=["vLLM's", "of the model state"])
@pytest.mark.parametrize(
    ("verifier", "options", "said"),
    [
        (HeadSampler, {}, None),
        (HeadSampler, {"verify": "rejection"}, None),
        (
            HeadSampler,
            {"verify": "coupled"},
            r"verify 'coupled'.* with GPUWatermarkSampler: only vLLM's plain Sampler",
        ),
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
    state = with_sampler(verifier, own, spec, CPU, lambda states: None)()
    with nullcontext() if said is None else pytest.raises(ServeConfigError, match=said):
        assert state.custom_sampler(plain if is_own else other) is kept
    assert type(other) is GPUWatermarkSampler  # untouched


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


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_seeds_of_different_steps_differ(seed: int) -> None:
    anchors = torch.cat([torch.arange(1, 5000), torch.tensor([2**20, 2**31 - 1])])
    found = step_seeds(torch.full_like(anchors, seed), anchors)
    assert found.dtype == torch.int64 and found.unique().numel() == anchors.numel()
    assert not (found == seed).any()  # steps without drafts use the request's own
