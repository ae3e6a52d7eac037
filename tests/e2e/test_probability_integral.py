"""Distribution test of sampled tokens by probability integral transforms, with every draft forced.

Each token x becomes u = P(all tokens more probable than x) + v P(x): P is the target's exact conditional given the text
before x, v a uniform number. If the engine samples from the target, all u are independent and uniform (Rosenblatt,
1952), so that tokens of all positions and texts are counted together. Compared with the total variation of whole texts,
small errors in the draft distribution q that the rejection sampler reads are found: the injected fault scores drafts
by 0.85 q + 0.15 / V where they were drawn from q.

Level: at most 1e-6, by the Dvoretzky-Kiefer-Wolfowitz bound on the distance D of N uniform numbers, P(D sqrt(N) > c) <=
2 exp(-2 c^2). Power, by the same bound: the fault moves the distribution of u by D_FAULT, and is found with probability
1 - 2 exp(-2 N (D_FAULT - c / sqrt(N))^2) or more. The seeds of the engines and of v are 0. The total variation of
20,000 texts of six tokens (test_distribution.py) does not find the fault where V1's plan chooses the number of drafts.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.support.distributions import asking, draws_of
from tests.support.engine import build, run
from tests.support.models import make_head, make_target, make_tokenizer
from tests.support.requests import ALL_DRAFTS

VOCAB, WINDOW, PROMPT, LENGTH = 8, 4, [0, 1], 24
TEXTS = 2_000  # N = 48,000
D_FAULT = 0.0218  # measured with 16,000 texts on V1
MIN_POWER = 0.999


def critical(level: float) -> float:
    """The D sqrt(N) that uniform numbers exceed with probability `level` at most."""
    return math.sqrt(math.log(2 / level) / 2)


CRITICAL, CLEAR = critical(1e-6), critical(1e-12)  # 2.69 and 3.76


@torch.no_grad()
def distance(target: LlamaForCausalLM, draws: Tensor) -> float:
    """D sqrt(N), N = S * L: Kolmogorov-Smirnov distance of the transforms of draws [S, L] from uniform numbers."""
    texts = torch.cat([torch.tensor(PROMPT).expand(len(draws), -1), draws], dim=1)
    probs = target(texts).logits[:, len(PROMPT) - 1 : -1].double().softmax(-1)  # [S, L, V]
    own = probs.gather(2, draws[..., None])  # [S, L, 1]
    v = torch.rand(draws.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = ((probs * (probs > own)).sum(-1) + v * own[..., 0]).flatten().sort().values
    ranks = torch.arange(len(u) + 1) / len(u)
    return float(torch.maximum(ranks[1:] - u, u - ranks[:-1]).max()) * math.sqrt(len(u))


@pytest.mark.parametrize(
    ("runner", "fault"),
    [("v1", "uniform in q"), pytest.param("v2 at once", "uniform in q, V2", marks=pytest.mark.slow)],
)
def test_tokens_follow_the_conditionals_of_the_target_and_wrong_q_is_found(
    runner: str, fault: str, tmp_path: Path
) -> None:
    target = make_target(tmp_path / "target", VOCAB, seed=1, hidden_size=32)
    make_tokenizer(tmp_path / "target", VOCAB)
    make_head(tmp_path / "head", target, "btree", WINDOW, components=3)
    sampling = {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True, "detokenize": False}
    arguments = {"max_model_len": 32, "block_size": 32, "max_num_seqs": 1024, "max_num_batched_tokens": 4096}
    arguments |= {"kv_cache_memory_bytes": 1 << 28, "seed": 0}
    calls = [asking(PROMPT, sampling, TEXTS)]
    engines = {name: build(tmp_path, "head", calls, name, ALL_DRAFTS, **arguments) for name in (None, fault)}
    assert 1 - 2 * math.exp(-2 * (math.sqrt(TEXTS * LENGTH) * D_FAULT - CRITICAL) ** 2) > MIN_POWER  # 0.9997

    found: dict[str | None, float] = {}
    for name, (reply,) in run(engines, runner, async_scheduling=False).items():
        assert reply.drafted / reply.steps > WINDOW - 1.1, "drafts are not forced"
        found[name] = distance(target, torch.tensor(draws_of(reply)))
    print(f"{runner}: D sqrt(N) {found}, at most {CRITICAL:.2f} by chance")
    assert found[None] < CRITICAL
    assert found[fault] > CLEAR
