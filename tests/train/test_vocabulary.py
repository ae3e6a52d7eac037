"""The draft vocabulary of a new head: the most frequent ids of its data."""

from __future__ import annotations

import pytest
import torch

from vllm_mtpc.data.rows import choose_ids, coverage

V = 20_000


def spread(ids: int, rare: int = 0) -> torch.Tensor:
    """100 tokens of each of the last `ids` ids, and one of each of the `rare` ids before them."""
    return torch.cat([torch.arange(V - ids, V).repeat(100), torch.arange(V - ids - rare, V - ids)])


@pytest.mark.parametrize(
    "tokens, vocab_size, size, expected",
    [
        (spread(100), V, None, 8192),  # the fewest
        (spread(8000, rare=8000), V, None, 8192),  # 99.03 % of the data; 8,000 ids are 99.01 %
        (spread(8000, rare=9000), V, None, 16_384),  # 8,192 ids are 98.9 %
        (spread(9000), V, None, 16_384),
        (spread(19_000), V, None, None),  # 16,384 ids are 86 %: all
        (spread(100) - 3616, 16_384, None, None),  # a small vocabulary is drafted whole
        (spread(100), V, 0, None),
        (spread(100), V, V, None),
        (spread(100), V, 64, 64),
    ],
)
def test_number_of_ids_covers_the_data(tokens, vocab_size, size, expected):
    ids = choose_ids(tokens, vocab_size, size)
    assert (None if ids is None else len(ids)) == expected
    if ids is not None:
        assert ids.dtype == torch.int64 and (ids[1:] > ids[:-1]).all()
        assert coverage(ids, tokens) >= (0.99 if size is None else 0.6)


def test_most_frequent_ids_are_chosen():
    assert choose_ids(torch.tensor([5, 5, 5, 2, 2, 9, 9, 7]), 10, 3).tolist() == [2, 5, 9]
