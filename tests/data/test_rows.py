"""Packing: every kept token once, in order, nothing across rows or documents; held-out documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtpc.data.rows import Rows, pack, split_validation
from vllm_mtpc.data.sources import Documents
from vllm_mtpc.errors import UsageError
from vllm_mtpc.train.windows import eligible, window_tokens

MASKS = st.lists(st.lists(st.booleans(), max_size=40), min_size=1, max_size=25)


def numbered(masks: list[list[bool]]) -> Documents:
    """Documents whose tokens count on through all of them, so that each token tells where it is from."""
    starts = np.cumsum([0, *(len(mask) for mask in masks)])
    return [(start + np.arange(len(mask)), np.array(mask, bool)) for start, mask in zip(starts, masks, strict=False)]


def trained(*lengths: int) -> Documents:
    return numbered([[True] * length for length in lengths])


def parts(rows: Rows) -> list[tuple[list[int], list[bool]]]:
    """(tokens, trained) of each document of each row, taken from the numbers in `document`."""
    found = []
    for tokens, document, mask in zip(*rows, strict=True):
        for number in range(int(document.max()) + 1):
            at = document == number
            found.append((tokens[at].tolist(), mask[at].tolist()))
    return found


@given(MASKS, st.integers(2, 16), st.integers(0, 5), st.integers(2, 12))
@settings(max_examples=300, deadline=None)
def test_every_token_of_every_kept_document_once_and_in_order(
    masks: list[list[bool]], seq_len: int, seed: int, window: int
) -> None:
    documents = numbered(masks)
    pieces = []  # by definition: split every seq_len tokens, keep pieces with a trained token after the first
    for index, (tokens, mask) in enumerate(documents):
        for at in range(0, len(tokens), seq_len):
            if mask[at + 1 : at + seq_len].any():
                pieces.append((index, tokens[at : at + seq_len].tolist(), mask[at : at + seq_len].tolist()))
    if not pieces:
        with pytest.raises(UsageError, match="has a token to train on after its first"):
            pack(documents, seq_len, window, seed)
        return
    rows, report = pack(documents, seq_len, window, seed)
    assert sorted(parts(rows)) == sorted((tokens, mask) for _, tokens, mask in pieces)

    for document in rows.document:  # 0, 1, 2, ... without gaps, padding at the end only
        real = document[document >= 0]
        assert len(real) and (document[len(real) :] == -1).all()
        steps = real.diff()
        assert real[0] == 0 and ((steps == 0) | (steps == 1)).all()
    padding = rows.document < 0
    assert not rows.tokens[padding].any() and not rows.trained[padding].any()

    assert rows.tokens.shape == rows.document.shape == rows.trained.shape == (report.rows, seq_len)
    assert (rows.tokens.dtype, rows.document.dtype, rows.trained.dtype) == (torch.int32, torch.int32, torch.bool)
    assert report.documents == len({index for index, *_ in pieces}) == len(documents) - report.dropped
    assert report.tokens == sum(len(tokens) for _, tokens, _ in pieces)
    assert report.padding == pytest.approx(padding.float().mean().item())

    row, start = eligible(rows).nonzero(as_tuple=True)
    longest = int((window_tokens(rows, row, start, 64) >= 0).sum(1).max())  # by the windows that training reads
    assert (report.warning is None) == (longest >= window)
    if report.warning:
        assert f"draft positions beyond {longest} are not trained" in report.warning


def test_same_seed_same_rows_other_seed_other_rows() -> None:
    documents = trained(*np.random.default_rng(0).integers(2, 30, 60))
    first, again, other = (pack(documents, 32, 4, seed)[0] for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.tokens[: len(other.tokens)], other.tokens[: len(first.tokens)])


def test_rows_are_full() -> None:
    """Lengths that fit together exactly leave no padding; a thousand mixed ones almost none."""
    _, report = pack(trained(7, 3, 5, 5, 4, 6, 2, 8), 10, 4, 0)
    assert (report.rows, report.padding) == (4, 0.0)
    _, report = pack(trained(*np.random.default_rng(0).integers(2, 100, 1000)), 256, 4, 0)
    assert report.padding < 0.01


@pytest.mark.parametrize(
    ("masks", "seq_len", "message"),
    [
        ([[True], [True], []], 8, "none of 3 document"),
        ([[True, False, False]], 8, "assistant's turn"),  # only the first token is trained
        ([[True] * 5], 1, "none of 1 document"),
        ([], 8, "none of 0 document"),
    ],
)
def test_unpackable_documents_are_refused(masks: list[list[bool]], seq_len: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pack(numbered(masks), seq_len, 4, 0)


@given(st.integers(2, 300), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_seed_selects_held_out_documents(count: int, seed: int) -> None:
    documents = trained(*range(1, count + 1))
    train, valid = ([tokens.tolist() for tokens, _ in part] for part in split_validation(documents, seed))
    assert len(valid) == max(1, round(0.02 * count))
    assert sorted([*train, *valid], key=len) == [tokens.tolist() for tokens, _ in documents]
    assert train == sorted(train, key=len)  # in their order
    assert [tokens.tolist() for tokens, _ in split_validation(documents, seed)[1]] == valid
    if count > 200:
        assert [tokens.tolist() for tokens, _ in split_validation(documents, seed + 1)[1]] != valid


def test_end_of_single_document_is_held_out() -> None:
    for size, first in ((500, 490), (4, 2)):
        (train, _), (valid, _) = (part for (part,) in split_validation(trained(size), 0))
        assert (train.tolist(), valid.tolist()) == (list(range(first)), list(range(first, size)))


def test_unsplittable_documents_are_refused() -> None:
    for documents in (trained(), trained(3)):
        with pytest.raises(UsageError, match="cannot be split for validation"):
            split_validation(documents, 0)
