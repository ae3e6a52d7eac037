"""Separate drafters of figure 4: what their rows read, and what a verifier accepts."""

from __future__ import annotations

import pytest
import torch

from benchmarks.paper import separate
from benchmarks.paper.separate import Drafter, Text


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    torch.manual_seed(0)
    return Drafter(16, 1, 7).eval()


@torch.inference_mode()
def test_row_reads_the_text_up_to_its_start_and_u_up_to_itself(drafter: Drafter) -> None:
    tokens, starts, u = torch.randint(7, (2, 12)), torch.tensor([3, 7]), torch.rand(2, 2, 4)
    plain = drafter.rows(tokens, starts, u)
    for first, reads in ((3, True), (4, False)):  # the windows start at 3 and 7
        later = tokens.clone()
        later[:, first:] = (later[:, first:] + 1) % 7
        found = (drafter.rows(later, starts, u) - plain).abs().amax((0, 2, 3)) > 1e-5
        assert found.tolist() == [reads, True]
    other = u.clone()
    other[:, 0, 2] = (other[:, 0, 2] + 0.5) % 1
    moved = (drafter.rows(tokens, starts, other) - plain).abs().amax((0, 3))
    assert (moved[0, :2] < 1e-5).all() and (moved[0, 2:] > 1e-5).all() and (moved[1] < 1e-5).all()


@torch.inference_mode()
def test_rejection_sampling_accepts_what_enumeration_says(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over texts drawn from q the mean of min(1, p / q) is the sum of min(p, q)."""
    monkeypatch.setattr(separate, "NEW", 1)
    monkeypatch.setattr(separate, "WINDOW", 1)
    prompt, q = torch.randint(7, (separate.PROMPT,)), torch.softmax(2 * torch.randn(7), 0).double()
    p = drafter.next_tokens(prompt[None])[0, -1].softmax(-1).double()
    every = torch.cat([prompt.expand(7, -1), torch.arange(7)[:, None]], 1)  # each token once
    right = torch.nn.functional.pad(q[:, None], (separate.PROMPT, 0), value=1.0)
    found = separate.alive("autoregressive", drafter, Text(every, torch.zeros_like(right), right))
    assert torch.allclose((q * found[:, 0, 0]).sum(), torch.minimum(p, q).sum(), atol=1e-6)


def test_drafter_learns_the_token_of_its_u() -> None:
    """A target of independent tokens, half of which are guessed without u."""
    shape = (64, separate.PROMPT + separate.NEW + separate.WINDOW)
    tokens = torch.randint(2, shape, generator=torch.Generator().manual_seed(0))
    text = Text(tokens, tokens.double() / 2, (tokens.double() + 1) / 2)
    model = separate.trained("o-ptp", (16, 1), 0, text, 2, 60)
    chances = separate.alive("o-ptp", model, Text(*(value[:4] for value in text)))
    assert separate.accepted(chances)[3][0] > 4.5  # of 5 tokens/step with 4 drafts
