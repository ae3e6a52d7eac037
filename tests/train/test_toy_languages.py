"""The paper's claim at the size of a test: rows that receive u draft what no rows without it can.

In the language `coin` (benchmarks/paper/toy.py) a coin decides all tokens of a text. A student with u reads the coin
and drafts the text whole; one without u guesses it, and needs two steps for what is one: UNAWARE, an eighth of the
texts apart. Trained by the package's own trainer on the teacher's own text, measured on other texts of it.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.paper import toy

WINDOW = toy.PHRASE


@pytest.fixture(scope="module")
def coin() -> toy.Toy:
    torch.set_num_threads(1)
    return toy.make("coin", WINDOW)


def test_rows_that_are_told_u_draft_what_a_coin_decides(coin: toy.Toy) -> None:
    """The ceiling is the window: a student that picks as the teacher does never ends a step early."""
    found = toy.measure(coin, toy.train(coin, WINDOW, 450, variant="o-ptp"))
    assert found.tokens_per_step > 0.9 * WINDOW
    # With another text's coin a step is wasted on another phrase, as often as a guess is wrong.
    assert found.shuffled_tokens_per_step < 1.1 * toy.UNAWARE


def test_rows_that_are_not_cannot(coin: toy.Toy) -> None:
    """The bound is the language's; the student of equal rank, data and steps is below, and the bound far below 0.9."""
    found = toy.measure(coin, toy.train(coin, WINDOW, 450, variant="independent"))
    # 160 texts hold about 20 lucky coins; four standard deviations of them are 0.5 tokens/step
    assert found.tokens_per_step < toy.UNAWARE + 0.5 < 0.6 * WINDOW
    assert found.shuffled_tokens_per_step == found.tokens_per_step
