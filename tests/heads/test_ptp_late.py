"""The late network: its formula written down once more, row by row, and drafting as the same recurrence."""

from __future__ import annotations

import math

import torch

from vllm_mtpc.heads.ptp.late import LateNetwork, build_late

SIZE, WIDTH, VOCAB = 6, 5, 9


def network() -> LateNetwork:
    torch.manual_seed(0)
    late = LateNetwork(SIZE, WIDTH)
    for value in late.outer.parameters():
        value.data.normal_()
    return late.requires_grad_(False)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(matrix: list[list[float]], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def scaled(vector: list[float]) -> tuple[list[float], float]:
    size = math.sqrt(sum(value * value for value in vector) / len(vector))
    return [value / size for value in vector], size


def written_down(late: LateNetwork, states: list[list[float]], tokens: list[list[float]]) -> list[list[float]]:
    """One window in Python's floats."""
    weights = {name: value.double().tolist() for name, value in late.state_dict().items()}
    before, found = [0.0] * SIZE, []
    for state, token in zip(states, tokens, strict=True):
        x, size = scaled(state)
        parts = [
            product(weights["state.weight"], x),
            product(weights["token.weight"], scaled(token)[0]),
            product(weights["before.weight"], before),
            weights["state.bias"],
        ]
        inner = [sum(values) for values in zip(*parts, strict=True)]
        inner = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in inner]
        parts = [x, product(weights["outer.weight"], inner), weights["outer.bias"]]
        y = [sum(values) for values in zip(*parts, strict=True)]
        before = scaled(y)[0]
        found.append([size * value for value in y])
    return found


def test_late_network_equals_its_formula() -> None:
    """float32 against Python's float64 over three rows; the 1e-6 in the root mean squares moves less than 1e-5."""
    late, hidden, tokens = network(), numbers(4, 3, SIZE, seed=1), numbers(4, 3, SIZE, seed=2)
    wanted = [written_down(late, *window) for window in zip(hidden.tolist(), tokens.tolist(), strict=True)]
    assert (late(hidden, tokens) - torch.tensor(wanted)).abs().max() < 3e-5 * torch.tensor(wanted).abs().max()


def test_untrained_late_network_changes_nothing() -> None:
    """But for the division by the size and back: one rounding each."""
    hidden, tokens = numbers(2, 3, SIZE, seed=3), numbers(2, 3, SIZE, seed=4)
    assert torch.allclose(build_late(SIZE, WIDTH)(hidden, tokens), hidden, rtol=3e-7, atol=0)
    assert build_late(SIZE, 0) is None


def test_late_drafts_are_conditioned_on_the_drafts_before() -> None:
    late, hidden = network(), numbers(7, 4, SIZE, seed=5)
    embedding, lm_head = numbers(VOCAB, SIZE, seed=6), numbers(VOCAB, SIZE, seed=7)
    first = torch.arange(7)

    def drafted(first: torch.Tensor) -> torch.Tensor:
        return late.draft(
            hidden, first, lambda tokens: embedding[tokens], lambda state, k: (state @ lm_head.T).argmax(-1)
        )

    drafts = drafted(first)
    front = torch.cat([first[:, None], drafts[:, :-1]], 1)
    assert torch.equal(drafts, (late(hidden, embedding[front]) @ lm_head.T).argmax(-1))
    assert not torch.equal(drafts, drafted(first + 1))
