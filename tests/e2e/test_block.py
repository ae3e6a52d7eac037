"""Block verification on Model Runner V2: the target's text and distribution, from noise that no step looks at twice."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support import block_distribution, forks
from tests.support.distributions import noise_floor, total_variation
from tests.support.engine import Call, Engine, Reply, run
from vllm_mtpc import demo
from vllm_mtpc.proposers.config.versions import keys_noise_by_draft

PROMPT = list(b"def read(path):\n    ")
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 16}
SAMPLED = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "max_tokens": 12}
COUNT = 2000  # the injected fault shifts the third token by 0.084; this many draws allow 0.04


def engine(injected: str, method: str, verify: str | None) -> Engine:
    given = {
        "method": "mtpc",
        "model": str(demo.path("btree")),
        "rejection_sample_method": method,
        "verify": verify,
        "num_speculative_tokens_per_batch_size": "off",
    }
    calls = [Call([PROMPT, PROMPT[:9]], [GREEDY] * 2), Call([PROMPT, PROMPT[:9]], [SAMPLED, {**SAMPLED, "seed": 4}])]
    calls.append(Call([PROMPT], [SAMPLED]))
    return Engine(str(demo.path("target")), calls, {"speculative_config": given, "max_model_len": 96}, injected)


@pytest.fixture(scope="module")
def replies() -> dict[str, list[Reply]]:
    asked = {"block": ("block", "rejection"), "standard": ("standard", None), "coupled": ("block", None)}
    outputs = run({name: engine("noted_seeds", *given) for name, given in asked.items()}, "v2", async_scheduling=True)
    return outputs


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
    assert len(used) > 3 and len(set(used)) == len(used) and {seed for seed, _ in used} == {SAMPLED["seed"]}
    assert verified == [] if keys_noise_by_draft() else set(verified) <= set(drafted)
    assert replies["standard"][2].recorded == []  # vLLM's own noise where it will do


@pytest.mark.slow
@pytest.mark.parametrize("is_fresh", [True, False])
def test_distribution_of_the_kernels(is_fresh: bool) -> None:
    """vLLM's own kernels keep the distribution if drafts have a step's seeds; with a request's they do not."""
    texts = forks.call("v2", "tests.support.block_distribution:draws", is_fresh, COUNT)
    draws = [[text[2]] for text in texts]
    p, _ = block_distribution.distributions()
    outcomes = torch.tensor(list(itertools.product(range(block_distribution.VOCAB), repeat=block_distribution.LENGTH)))
    before = torch.cat([torch.zeros(len(outcomes), 1, dtype=torch.long), outcomes[:, :-1]], dim=1)
    distribution = (
        p[before, outcomes]
        .prod(dim=1)
        .view((block_distribution.VOCAB,) * block_distribution.LENGTH)
        .sum(dim=(0, 1))
        .numpy()
    )
    distance, floor = (
        total_variation(draws, distribution, block_distribution.VOCAB),
        noise_floor(distribution, len(draws)),
    )
    print(f"{is_fresh}: {len(draws)} draws, TV {distance:.5f}, allowed {floor:.5f}")
    assert (distance < floor) == is_fresh
