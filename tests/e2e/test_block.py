"""Block verification on Model Runner V2: the target's text and distribution, from noise that no step looks at twice."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support import forks
from tests.support.distributions import noise_floor, total_variation
from tests.support.engine import DEMO, Reply, ask, build, run
from tests.support.kernel_draws import block_distributions
from vllm_mtpc.proposers.config.versions import keys_noise_by_draft

PROMPT = list(b"def read(path):\n    ")
SEED = 3
COUNT = 2000  # the injected fault shifts the third token by 0.084; this many draws allow 0.04


@pytest.fixture(scope="module")
def replies() -> dict[str, list[Reply]]:
    prompts, sampled = [PROMPT, PROMPT[:9]], {"temperature": 1.0, "seed": SEED}
    two = ask(prompts, 12, **sampled)
    two.sampling[1] = {**two.sampling[1], "seed": SEED + 1}
    calls = [ask(prompts, 16), two, ask([PROMPT], 12, **sampled)]
    asked = {"block": ("block", "rejection"), "standard": ("standard", None), "coupled": ("block", None)}
    engines = {}
    for name, (method, verify) in asked.items():
        spec = {"rejection_sample_method": method, "verify": verify, "num_speculative_tokens_per_batch_size": "off"}
        engines[name] = build(DEMO, "btree", calls, "noted_seeds", spec, max_model_len=96)
    return run(engines, "v2")


def test_greedy_text_equals_standard_verification(replies: dict[str, list[Reply]]) -> None:
    assert replies["block"][0].tokens == replies["standard"][0].tokens


def test_seeded_request_does_not_depend_on_its_batch(replies: dict[str, list[Reply]]) -> None:
    assert replies["block"][1].tokens[0] == replies["block"][2].tokens[0]
    assert replies["coupled"][1].tokens == replies["standard"][1].tokens


def test_step_verifies_with_the_noise_of_its_drafts(replies: dict[str, list[Reply]]) -> None:
    """The drafter notes a step's seed by its anchor, the verifier the same one; and none comes twice.

    vLLM 0.33's verifier has noise of a step's own.
    """
    noted = replies["block"][2].recorded
    drafted = [(seed, anchor) for who, seed, anchor in noted if who == "speculator"]
    verified = [(seed, anchor) for who, seed, anchor in noted if who == "verification"]
    used = drafted if keys_noise_by_draft() else verified
    assert len(used) > 3 and len(set(used)) == len(used) and {seed for seed, _ in used} == {SEED}
    assert verified == [] if keys_noise_by_draft() else set(verified) <= set(drafted)
    assert replies["standard"][2].recorded == []  # vLLM's own noise where it will do


@pytest.mark.slow
@pytest.mark.parametrize("is_fresh", [True, False])
def test_distribution_of_the_kernels(is_fresh: bool) -> None:
    """vLLM's own kernels keep the distribution if drafts have a step's seeds; with a request's they do not."""
    texts = forks.call("v2", "tests.support.kernel_draws:block_texts", is_fresh, COUNT)
    p, outcomes = block_distributions()[0], torch.tensor(list(itertools.product((0, 1), repeat=3)))
    before = torch.nn.functional.pad(outcomes[:, :-1], (1, 0))
    distribution = p[before, outcomes].prod(dim=1).view(4, 2).sum(dim=0).numpy()  # of the third token
    draws = [[text[2]] for text in texts]
    distance, floor = total_variation(draws, distribution, 2), noise_floor(distribution, len(draws))
    print(f"{is_fresh}: {len(draws)} draws, TV {distance:.5f}, allowed {floor:.5f}")
    assert (distance < floor) == is_fresh
