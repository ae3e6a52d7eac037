"""Documents packed into rows of equal length, and held-out documents."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_mtpc.data.sources import Documents
from vllm_mtpc.errors import UsageError

HELD_OUT = 0.02  # share of the documents


class Rows(NamedTuple):
    """Packed rows."""

    tokens: Tensor  # [N, S] int32, 0 in padding
    document: Tensor  # [N, S] int32, number of the document within its row, -1 in padding
    trained: Tensor  # [N, S] bool, whether the token is a target of the loss


class PackingReport(NamedTuple):
    """Counts of a packing."""

    documents: int  # in the rows
    dropped: int  # documents in which no window can start
    tokens: int  # in the rows
    rows: int
    padding: float  # share of padding in the rows
    warning: str | None  # set if no document is long enough for a whole window


def pack(documents: Documents, seq_len: int, window: int, seed: int) -> tuple[Rows, PackingReport]:
    """Pack documents into rows of `seq_len` tokens, best fit by decreasing length.

    A document is whole in one row; a longer one becomes several documents of `seq_len` tokens. Documents without a
    trained token after their first are dropped. The seed decides the order of the rows.

    Raises:
        UsageError: No document is left, or `seq_len` is below 2.
    """
    if seq_len < 2:
        raise UsageError(f"seq_len={seq_len}: a window needs two tokens; give seq_len of 2 or more")
    document, start, length = _split_to_rows(documents, seq_len)
    if not len(document):
        raise UsageError(
            f"none of {len(documents)} document(s) has a token to train on after its first; "
            "give longer documents, or conversations with an assistant's turn"
        )
    row_of, at, count = _place(length, seq_len, np.random.default_rng(seed))
    tokens, trained = np.zeros((count, seq_len), np.int32), np.zeros((count, seq_len), bool)
    number = np.full((count, seq_len), -1, np.int32)
    for row, first, begin, size in np.stack([row_of, at, start, length], 1)[np.lexsort((at, row_of))].tolist():
        source, target = slice(begin, begin + size), slice(first, first + size)
        tokens[row, target] = documents.tokens[source]
        trained[row, target] = documents.trained[source]
        number[row, target] = number[row, first - 1] + 1 if first else 0
    rows = Rows(torch.from_numpy(tokens), torch.from_numpy(number), torch.from_numpy(trained))
    whole, packed = len(np.unique(document)), int(length.sum())
    padding = 1 - packed / (count * seq_len)
    return rows, PackingReport(whole, len(documents) - whole, packed, count, padding, _warn_short(rows, window))


def split_validation(documents: Documents, seed: int) -> tuple[Documents, Documents]:
    """Return training documents and held-out ones: 2 %, one or more, chosen by the seed.

    Of a single document the last 2 % of its tokens are held out.

    Raises:
        UsageError: One of the parts would be empty.
    """
    count = len(documents)
    if count > 1:
        held = min(count - 1, max(1, round(HELD_OUT * count)))
        chosen = np.zeros(count, bool)
        chosen[np.random.default_rng(seed).permutation(count)[:held]] = True
        return documents.select(~chosen), documents.select(chosen)
    tokens, trained = documents.tokens, documents.trained
    if len(tokens) < 4:
        raise UsageError(
            f"{len(tokens)} token(s) in {count} document(s) cannot be split for validation; give two documents or more"
        )
    size = min(len(tokens) - 2, max(2, round(len(tokens) * (1 - HELD_OUT))))
    return Documents.join([(tokens[:size], trained[:size])]), Documents.join([(tokens[size:], trained[size:])])


def eligible(rows: Rows) -> Tensor:
    """Return where a window may start, [N, S] bool: the next token is in the same document and trained."""
    starts = torch.zeros_like(rows.trained, dtype=torch.bool)
    same = (rows.document[:, 1:] == rows.document[:, :-1]) & (rows.document[:, 1:] >= 0)
    starts[:, :-1] = same & rows.trained[:, 1:]
    return starts


def _split_to_rows(documents: Documents, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return document, first token and length, [P] int64 each, of pieces of at most seq_len tokens with a window."""
    counts = -(-documents.lengths // seq_len)
    document = np.repeat(np.arange(len(documents)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # of the piece in its document
    start = documents.offsets[document] + number * seq_len
    length = np.minimum(documents.offsets[document + 1] - start, seq_len)
    usable = length > 1
    spans = np.stack([start[usable] + 1, start[usable] + length[usable]], 1).ravel()  # without the first token
    spans = spans[:-1] if len(spans) and spans[-1] == len(documents.tokens) else spans
    usable[usable] = np.logical_or.reduceat(documents.trained, spans)[::2] if len(spans) else False
    return document[usable], start[usable], length[usable]


def _place(lengths: np.ndarray, seq_len: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Return row and first position of each piece, and the number of rows: best fit by decreasing length.

    `by_space` lists rows by their free positions; `open_spaces` has bit s set if a row has s free positions.
    """
    order = generator.permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    by_space: list[list[int]] = [[] for _ in range(seq_len + 1)]
    open_spaces, count = 0, 0
    row_of, at = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = open_spaces >> length
        if enough:
            space = length + (enough & -enough).bit_length() - 1  # the smallest that is enough
            row = by_space[space].pop()
            if not by_space[space]:
                open_spaces ^= 1 << space
        else:
            row, space, count = count, seq_len, count + 1
        row_of[piece], at[piece] = row, seq_len - space
        if space > length:
            by_space[space - length].append(row)
            open_spaces |= 1 << (space - length)
    return generator.permutation(count)[row_of], at, count


def _warn_short(rows: Rows, window: int) -> str | None:
    flat = np.concatenate([[False], eligible(rows).numpy().ravel()])  # no window starts at the end of a row
    edges = np.flatnonzero(flat[1:] != flat[:-1])  # first and last position of each run of targets
    longest = int((edges[1::2] - edges[::2]).max())
    if longest >= window:
        return None
    return (
        f"no document has more than {longest} trained token(s) in a row after its first, and the window is {window}: "
        f"draft positions beyond {longest} are not trained; give longer documents, a longer seq_len or a window of "
        f"{max(2, longest)}"
    )
