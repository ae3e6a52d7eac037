"""The late network: its formula written down once more, row by row, and drafting as the same recurrence."""

from __future__ import annotations

import torch

from vllm_mtpc.heads.ptp.layers import LateNetwork

SIZE, WIDTH, VOCAB = 6, 5, 9


def network() -> LateNetwork:
    torch.manual_seed(0)
    late = LateNetwork(SIZE, WIDTH)
    for value in late.outer.parameters():
        value.data.normal_()
    return late.requires_grad_(False)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def root_mean_square(row: torch.Tensor) -> torch.Tensor:
    return row.square().mean().sqrt()


def written_down(late: LateNetwork, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """One window [m, D] in float64, row by row."""
    weights = {name: value.double() for name, value in late.state_dict().items()}
    before, found = torch.zeros(SIZE, dtype=torch.float64), []
    for state, token in zip(states.double(), tokens.double(), strict=True):
        x, embedded = state / root_mean_square(state), token / root_mean_square(token)
        inner = weights["state.weight"] @ x + weights["state.bias"]
        inner = inner + weights["token.weight"] @ embedded + weights["before.weight"] @ before
        y = x + weights["outer.weight"] @ (inner * (1 + torch.erf(inner / 2**0.5)) / 2) + weights["outer.bias"]
        before = y / root_mean_square(y)
        found.append(root_mean_square(state) * y)
    return torch.stack(found)


def test_late_network_equals_its_formula() -> None:
    """float32 against float64 over three rows; the 1e-6 in the root mean squares moves less than 1e-5."""
    late, hidden, tokens = network(), numbers(4, 3, SIZE, seed=1), numbers(4, 3, SIZE, seed=2)
    wanted = torch.stack([written_down(late, *window) for window in zip(hidden, tokens, strict=True)])
    assert (late(hidden, tokens) - wanted).abs().max() < 3e-5 * wanted.abs().max()


def test_untrained_late_network_changes_nothing() -> None:
    """But for the division by the size and back: one rounding each."""
    hidden, tokens = numbers(2, 3, SIZE, seed=3), numbers(2, 3, SIZE, seed=4)
    assert torch.allclose(LateNetwork(SIZE, WIDTH)(hidden, tokens), hidden, rtol=3e-7, atol=0)


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
