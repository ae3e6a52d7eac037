"""Drafts cut by their chances: the output keeps the target's law, because no draft is looked at before it is cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from tests.e2e.engine import Call, Engine, run
from tests.e2e.laws import noise_floor, total_variation
from vllm_mtpc import demo
from vllm_mtpc.circuits import CircuitParams, get_circuit
from vllm_mtpc.kernels.draft import naive
from vllm_mtpc.proposers.v1.survival import Survival

VOCAB, DRAFTS, COUNT = 3, 3, 100_000
LEAST = 0.35
Cut = Callable[[Survival, int, Tensor, Tensor], None]  # (survival, k, law [B, V], drawn token [B])


def test_what_is_kept_is_a_prefix() -> None:
    survival = Survival(4, 3, 0.5)
    survival.confidence[:3] = torch.tensor([[0.9, 0.5, 0.9], [0.4, 1.0, 1.0], [1.0, 0.9, 0.6]])
    assert survival.lengths(3, 3) == [1, 0, 3]
    assert survival.lengths(3, 2) == [1, 0, 2]


def test_zero_keeps_all() -> None:
    survival = Survival(2, 3, 0.0)
    survival.argmax(0, torch.full((2, 5), 0.2).log())
    assert survival.lengths(2, 3) == [3, 3] and (survival.confidence == 1).all()


def test_chances() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [1.0, 0.0, 0.0]])
    survival = Survival(5, 2, 0.1)
    survival.drawn(1, probs, torch.tensor([True, False, False]))
    survival.argmax(0, probs.log())
    torch.testing.assert_close(survival.confidence[:3, 1], torch.tensor([0.7, 0.54**0.5, 1.0]))
    torch.testing.assert_close(survival.confidence[:3, 0], torch.tensor([0.7, 0.7, 1.0]))


def look_at_the_law(survival: Survival, k: int, probs: Tensor, token: Tensor) -> None:
    survival.drawn(k, probs, torch.zeros(len(probs), dtype=torch.bool))


def look_at_the_token(survival: Survival, k: int, probs: Tensor, token: Tensor) -> None:
    """The fault: how sure the drafter is of the very token it drew."""
    survival.confidence[:, k] = probs.gather(1, token[:, None])[:, 0]


def target_law(tokens: Tensor) -> Tensor:
    """p(. | tokens [B, j]) [B, V], of a target that is much less sure than the drafter."""
    generator = torch.Generator().manual_seed(3)
    tables = torch.randn(DRAFTS + 1, VOCAB ** (DRAFTS + 1), VOCAB, generator=generator)
    index = tokens @ (VOCAB ** torch.arange(tokens.shape[1]))
    return tables[tokens.shape[1]][index].mul(0.7).softmax(-1)


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def speculate(look: Cut) -> Tensor:
    """[COUNT, DRAFTS + 1] tokens: one step of drafts, cut and verified, then the target's own."""
    generator = torch.Generator().manual_seed(0)
    circuit = get_circuit("hmm", DRAFTS + 1, 2)
    # one component is sure of what comes and one is not; the first tokens tell which of them holds
    leaf = torch.randn(1, DRAFTS + 1, 2, VOCAB, generator=generator) * torch.tensor([4.0, 0.5])[:, None]
    root, inner = torch.zeros(1, 2), 2 * torch.eye(2).expand(1, circuit.num_inner, 2, 2)
    parts = [part.log_softmax(-1) for part in (leaf, root, inner)]
    params = CircuitParams(*(part.expand(COUNT, *part.shape[1:]) for part in parts))
    survival, laws = Survival(COUNT, DRAFTS, LEAST), []

    def pick(log_q: Tensor, k: int) -> Tensor:
        laws.append(log_q.exp())
        token = draw(laws[-1], generator)
        look(survival, k, laws[-1], token)
        return token

    evidence = torch.zeros(COUNT, 2)  # a verifier's token that tells nothing
    drafts = naive.draft(circuit.program, evidence, params.leaf[:, 1:], params.root, params.inner, pick)
    length = torch.tensor(survival.lengths(COUNT, DRAFTS))
    assert length.unique().numel() > 1  # some are cut, and not all alike
    tokens, running = torch.zeros(COUNT, 0, dtype=torch.long), torch.ones(COUNT, dtype=torch.bool)
    for k in range(DRAFTS + 1):
        p = target_law(tokens)
        token = draw(p, generator)  # behind the drafts: a bonus token, and then plain decoding
        if k < DRAFTS:
            q, draft = laws[k], drafts[:, k]
            chance = p.gather(1, draft[:, None])[:, 0] / q.gather(1, draft[:, None])[:, 0]
            accepted = torch.rand(COUNT, generator=generator) < chance
            residual = (p - q).clamp(min=0) + 1e-12
            verified = torch.where(accepted, draft, draw(residual, generator))
            token = torch.where(running & (k < length), verified, token)
            running &= accepted & (k < length)
        tokens = torch.cat([tokens, token[:, None]], dim=1)
    return tokens


def distance_and_floor(look: Cut) -> tuple[float, float]:
    outcomes = torch.tensor(list(itertools.product(range(VOCAB), repeat=DRAFTS + 1)))
    law = torch.ones(len(outcomes), dtype=torch.float64)
    for k in range(DRAFTS + 1):
        law *= target_law(outcomes[:, :k]).double().gather(1, outcomes[:, k : k + 1])[:, 0]
    law = law.numpy()
    return total_variation(speculate(look).tolist(), law, VOCAB), noise_floor(law, COUNT)


def test_the_law_is_the_targets() -> None:
    distance, floor = distance_and_floor(look_at_the_law)
    print(f"TV {distance:.5f}, allowed {floor:.5f}")
    assert distance < floor


def test_a_planted_look_at_the_token_is_caught() -> None:
    distance, floor = distance_and_floor(look_at_the_token)
    print(f"planted: TV {distance:.5f}, allowed {floor:.5f}")
    assert distance > 2 * floor


def test_served() -> None:
    """The same greedy text from fewer verified drafts, of which more are accepted."""
    text = b"def read(path):\n    with open(path) as file:\n"
    call = Call([list(text), list(text[:15])], [{"temperature": 0.0, "ignore_eos": True, "max_tokens": 60}] * 2)
    given = {"method": "mtpc", "model": str(demo.path("btree")), "num_speculative_tokens_per_batch_size": "off"}
    engines = {
        least: Engine(
            str(demo.path("target")),
            [call],
            {"speculative_config": given | ({} if least == "default" else {"min_survival": least})},
        )
        for least in (0, "default", 0.6)
    }
    replies = run(engines, "v1")
    for reply in replies.values():
        assert not isinstance(reply, str), reply
    texts = [reply[0].tokens for reply in replies.values()]
    assert texts[0] == texts[1] == texts[2]
    counts = [reply[0].metrics for reply in replies.values()]
    drafted, accepted = (
        [one[f"vllm:spec_decode_num_{what}_tokens"] for one in counts] for what in ("draft", "accepted")
    )
    assert drafted[0] > drafted[1] > drafted[2] > 0
    shares = [a / d for a, d in zip(accepted, drafted, strict=True)]
    assert shares[0] < shares[1] < shares[2]
