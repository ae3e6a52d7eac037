"""The law of what a PTP head's engine says, against enumeration, and its text on two tensor-parallel ranks.

Kernels are interpreted, so draws are few: the law of the first two tokens, of which the second is a draft's or a
recovered one in every request. The planted fault (u squared, for drafter and verifier alike) must be found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.engine import Call, Engine, run
from tests.e2e.laws import SETTINGS, Setting, asking, draws_of, exact_law, law_of, noise_floor, total_variation
from tests.e2e.models import make_ptp_head, make_target

VOCAB, LENGTH, PROMPT, DRAWS = 6, 2, [0, 3], 2_000
SETTING = Setting(temperature=0.8, top_p=0.9)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("ptp_law")
    target = make_target(folder / "target", VOCAB, seed=1, hidden_size=32)
    make_ptp_head(folder / "head", target, "o-ptp", window=4)
    return folder, target


def engine(
    folder: Path, with_head: bool = True, plant: str | None = None, setting: Setting = SETTING, **arguments: Any
) -> Engine:
    sampling = {**setting.sampling(), "max_tokens": LENGTH, "ignore_eos": True, "detokenize": False}
    if with_head:
        arguments["speculative_config"] = {"method": "ptp", "model": str(folder / "head"), "draft_pass": "merged"}
    small = {"skip_tokenizer_init": True, "max_model_len": 32, "max_num_seqs": 64, "block_size": 32, **arguments}
    return Engine(str(folder / "target"), [asking(PROMPT, sampling, DRAWS)], small, plant)


@pytest.mark.slow
@pytest.mark.feature("temperature", "law", "ptp on V2")
def test_law_with_and_without_drafts(tiny) -> None:
    folder, target = tiny
    law = exact_law(target, PROMPT, LENGTH, SETTING)
    engines = {
        "undrafted": engine(folder, with_head=False, plant="coupled_without_drafts"),
        "drafted": engine(folder),
        "planted": engine(folder, plant="squared_u"),
    }
    distances = {}
    for name, replies in run(engines, "v2", timeout=3000).items():
        assert not isinstance(replies, str), (name, replies)
        draws = draws_of(replies[0])
        distances[name] = total_variation(draws, law, VOCAB)
    allowed = noise_floor(law, DRAWS)
    print(f"{DRAWS} draws, allowed {allowed:.4f}:", {name: round(value, 4) for name, value in distances.items()})
    assert distances["undrafted"] < allowed
    assert distances["drafted"] < allowed
    assert distances["planted"] > allowed
    assert np.isclose(law.sum(), 1)


@pytest.mark.column("ptp on V2")
@pytest.mark.parametrize("setting", [law_of(name) for name in SETTINGS])
def test_law_in_every_setting(tiny, setting: Setting) -> None:
    folder, target = tiny
    replies = run({"drafted": engine(folder, setting=setting)}, "v2", timeout=3000)["drafted"]
    assert not isinstance(replies, str), replies
    law, plain = (exact_law(target, PROMPT, LENGTH, each) for each in (setting, SETTINGS["T=1"]))
    distance, allowed = (
        total_variation(draws_of(replies[0]), law, VOCAB),
        noise_floor(law, DRAWS),
    )
    print(f"{setting}: {DRAWS} draws, TV {distance:.4f}, allowed {allowed:.4f}")
    assert distance < allowed
    assert setting == SETTINGS["T=1"] or np.abs(law - plain).sum() / 2 > allowed, "an ignored setting is not found"


@pytest.mark.feature("tensor parallel", "exact", "ptp on V2")
@pytest.mark.slow
@pytest.mark.parametrize("draft_pass", ["merged", "two-pass"])
def test_tensor_parallel(tiny, draft_pass: str) -> None:
    """Two ranks say what one says: adapters are sharded as their layers are, u is the same on every rank."""
    folder, _ = tiny
    sampled = {"temperature": 0.8, "top_k": 5, "max_tokens": 16, "seed": 3, "ignore_eos": True, "detokenize": False}
    greedy = {**sampled, "temperature": 0.0}
    spec = {"method": "ptp", "model": str(folder / "head"), "draft_pass": draft_pass}
    arguments = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 4, "speculative_config": spec}
    calls = [Call([PROMPT, [1, 2, 5]], [how, how]) for how in (sampled, greedy)]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}
    one = run({"one": Engine(str(folder / "target"), calls, arguments)}, "v2")["one"]
    two = run(
        {"two": Engine(str(folder / "target"), calls, {**arguments, "tensor_parallel_size": 2})}, "v2", **environment
    )["two"]
    assert not isinstance(one, str), one
    assert not isinstance(two, str), two
    assert [reply.tokens for reply in two] == [reply.tokens for reply in one]
    accepted = "vllm:spec_decode_num_accepted_tokens"
    assert two[-1].metrics[accepted] == one[-1].metrics[accepted]
