"""Windows of packed rows: their content, their order by the seed, and their division among processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtpc.data.rows import Rows
from vllm_mtpc.train.windows import WindowSource, eligible, window_states, window_tokens

S = 12


class Numbered:
    """Rows whose hidden states say where they are: hidden[row, t] = (row, t)."""

    def __init__(self, rows: Rows):
        self.rows, self.asked = rows, []

    def hidden(self, row_indices: torch.Tensor) -> torch.Tensor:
        self.asked.append(row_indices.tolist())
        at = torch.arange(S).expand(len(row_indices), S)
        return torch.stack([row_indices[:, None].expand_as(at), at], -1).float()


def make_rows(lengths: list[list[int]], untrained: set[tuple[int, int]] = frozenset()) -> Rows:
    """Rows of documents of these lengths; token at (row, t) is 100 * row + t + 1."""
    document = torch.full((len(lengths), S), -1, dtype=torch.int32)
    for row, documents in enumerate(lengths):
        at = 0
        for number, length in enumerate(documents):
            document[row, at : at + length] = number
            at += length
    tokens = (torch.arange(len(lengths))[:, None] * 100 + torch.arange(S) + 1).int().masked_fill(document < 0, 0)
    trained = document >= 0
    for row, at in untrained:
        trained[row, at] = False
    return Rows(tokens, document, trained)


documents = st.lists(st.lists(st.integers(1, S), max_size=4).filter(lambda d: sum(d) <= S), min_size=1, max_size=5)


@given(documents, st.sets(st.tuples(st.integers(0, 4), st.integers(0, S - 1)), max_size=8), st.integers(2, 6))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_window_holds_following_tokens_of_the_document(lengths, untrained, window):
    rows = make_rows(lengths, {(row, at) for row, at in untrained if row < len(lengths)})
    starts = eligible(rows)
    for row in range(len(lengths)):
        for t in range(S):
            expected = []
            for k in range(1, window + 1):
                at = t + k
                if at >= S or rows.document[row, at] != rows.document[row, t] or not rows.trained[row, at]:
                    break
                expected.append(int(rows.tokens[row, at]))
            inside = bool(rows.document[row, t] >= 0)
            assert bool(starts[row, t]) == (inside and bool(expected))
            if starts[row, t]:
                found = window_tokens(rows, torch.tensor([row]), torch.tensor([t]), window)[0].tolist()
                assert found == expected + [-1] * (window - len(expected))


def test_states_predict_their_tokens():
    rows = make_rows([[S], [5, 7]])
    hidden = Numbered(rows).hidden(torch.arange(2))
    states = window_states(hidden, torch.tensor([1]), torch.tensor([2]), 4)[0]
    assert states.tolist() == [[1, 2], [1, 3], [1, 4], [1, 5]]  # state t predicts token t + 1


def seen(batches, steps: int) -> list[set[tuple[float, ...]]]:
    """Windows of each step, named by the row and place their first state says."""
    found = []
    for _, batch in zip(range(steps), batches, strict=False):
        first = batch.hidden[batch.row, batch.start]
        found.append({tuple(place) for place in first.tolist()})
    return found


ROWS = [[S], [6, 6], [3, 4, 5], [12], [2, 10], [7, 5], [4, 4]]


def source(**changes) -> WindowSource:
    arguments = {"window": 3, "windows_per_step": 5, "block_rows": 3, "seed": 1, **changes}
    return WindowSource(Numbered(make_rows(ROWS)), **arguments)


def test_epoch_contains_every_window_once():
    one = source(windows_per_step=1)
    total = int(eligible(make_rows(ROWS)).sum())
    assert one.steps_per_epoch() == total
    steps = seen(one.batches(), total)
    assert len(set().union(*steps)) == total
    again = seen(source(windows_per_step=1).batches(), total)
    assert steps == again
    assert steps != seen(source(windows_per_step=1, seed=2).batches(), total)


def test_resumed_windows_skip_earlier_states():
    whole = source()
    steps = seen(whole.batches(), 30)
    for first in (0, 1, 7, whole.steps_per_epoch(), 17):
        later = source()
        assert seen(later.batches(first), 30 - first) == steps[first:]
    late = source()
    next(late.batches(whole.steps_of(whole.blocks(0)[0])))  # the first step of the second block
    assert late.source.asked == [whole.blocks(0)[1].tolist()]
    one = source(block_rows=100)  # a single block is computed once
    seen(one.batches(), 3 * one.steps_per_epoch())
    assert len(one.source.asked) == 1


@pytest.mark.parametrize("world", [2, 3])
def test_processes_divide_every_step(world):
    steps = seen(source().batches(), 12)
    shares = [seen(source(rank=rank, world=world).batches(), 12) for rank in range(world)]
    for number, step in enumerate(steps):
        parts = [share[number] for share in shares]
        assert set().union(*parts) == step
        assert sum(map(len, parts)) == len(step)
    counts = []
    for rank in range(world):
        batches = source(rank=rank, world=world).batches()
        counts.append([next(batches).counts.tolist() for _ in range(12)])
    assert all(count == counts[0] for count in counts)  # every process knows the counts of the whole step
