"""Documents packed into rows of equal length, held-out documents, and the draft vocabulary of a text."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_mtpc.data.sources import Documents
from vllm_mtpc.errors import UsageError

HELD_OUT = 0.02  # share of the documents
ALL_IDS = 16_384  # largest vocabulary of a target that is drafted whole by default
FEWEST, COVERAGE = 8_192, 0.99  # of the default draft vocabulary


class Rows(NamedTuple):
    tokens: Tensor  # [N, S] int32, 0 in padding
    document: Tensor  # [N, S] int32, number of the document within its row, -1 in padding
    trained: Tensor  # [N, S] bool, whether the token is a target of the loss


class PackingReport(NamedTuple):
    documents: int  # in the rows
    dropped: int  # documents in which no window can start
    tokens: int  # in the rows
    rows: int
    padding: float  # share of padding in the rows
    warning: str | None  # set if no document is long enough for a whole window


def pack(documents: Documents, seq_len: int, window: int, seed: int) -> tuple[Rows, PackingReport]:
    """Pack documents into rows of `seq_len` tokens, best fit by decreasing length.

    A document is whole in one row; a longer one becomes several documents of `seq_len` tokens. Documents without a
    trained token after their first are dropped. The seed decides the order of the rows. Raises UsageError.
    """
    pieces = [
        (index, tokens[begin : begin + seq_len], trained[begin : begin + seq_len])
        for index, (tokens, trained) in enumerate(documents)
        for begin in range(0, len(tokens), seq_len)
        if trained[begin + 1 : begin + seq_len].any()
    ]
    if not pieces:
        raise UsageError(
            f"none of {len(documents)} document(s) has a token to train on after its first; "
            "give longer documents, or conversations with an assistant's turn"
        )
    placed = _place(np.array([len(ids) for _, ids, _ in pieces]), seq_len, np.random.default_rng(seed))
    shape = len(placed), seq_len
    tokens, number, trained = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, bool)
    for row, chosen in enumerate(placed):
        end = 0
        for own, piece in enumerate(chosen):
            _, ids, mask = pieces[piece]
            at = slice(end, end + len(ids))
            tokens[row, at], number[row, at], trained[row, at], end = ids, own, mask, at.stop
    rows = Rows(torch.from_numpy(tokens), torch.from_numpy(number), torch.from_numpy(trained))
    whole, packed = len({index for index, *_ in pieces}), sum(len(ids) for _, ids, _ in pieces)
    counts = whole, len(documents) - whole, packed, len(placed), 1 - packed / number.size
    return rows, PackingReport(*counts, _warn_short(rows, window))


def split_validation(documents: Documents, seed: int) -> tuple[Documents, Documents]:
    """Return training documents and held-out ones: 2 %, one or more, chosen by the seed.

    Of a single document the last 2 % of its tokens are held out. Raises UsageError if a part would be empty.
    """
    count = len(documents)
    if count > 1:
        held = min(count - 1, max(1, round(HELD_OUT * count)))
        chosen = set(np.random.default_rng(seed).permutation(count)[:held].tolist())
        numbered = list(enumerate(documents))
        return [one for i, one in numbered if i not in chosen], [one for i, one in numbered if i in chosen]
    tokens, trained = documents[0] if documents else (np.empty(0), np.empty(0))
    if len(tokens) < 4:
        raise UsageError(
            f"{len(tokens)} token(s) in {count} document(s) cannot be split for validation; give two documents or more"
        )
    size = min(len(tokens) - 2, max(2, round(len(tokens) * (1 - HELD_OUT))))
    return [(tokens[:size], trained[:size])], [(tokens[size:], trained[size:])]


def eligible(rows: Rows) -> Tensor:
    """Return where a window may start, [N, S] bool: the next token is in the same document and trained."""
    starts = torch.zeros_like(rows.trained, dtype=torch.bool)
    same = (rows.document[:, 1:] == rows.document[:, :-1]) & (rows.document[:, 1:] >= 0)
    starts[:, :-1] = same & rows.trained[:, 1:]
    return starts


def _place(lengths: np.ndarray, seq_len: int, generator: np.random.Generator) -> list[list[int]]:
    """Return the pieces of each row, from its start: best fit by decreasing length, rows in the generator's order."""
    order = generator.permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = defaultdict(list)  # rows by the number of their free positions
    spaces: list[int] = []  # of by_space, sorted
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        row, space, at = len(rows), seq_len, bisect_left(spaces, length)
        if at == len(spaces):
            rows.append([])
        else:
            space = spaces[at]  # the smallest that is enough
            row = by_space[space].pop()
            if not by_space[space]:
                del spaces[at]
        rows[row].append(piece)
        if rest := space - length:
            if not by_space[rest]:
                insort(spaces, rest)
            by_space[rest].append(row)
    return [rows[row] for row in generator.permutation(len(rows)).argsort()]


def _warn_short(rows: Rows, window: int) -> str | None:
    ends = np.flatnonzero(~eligible(rows).numpy().ravel())  # no window starts at the end of a row
    longest = int(np.diff(ends, prepend=-1).max()) - 1  # targets between two of them
    if longest >= window:
        return None
    return (
        f"no document has more than {longest} trained token(s) in a row after its first, and the window is {window}: "
        f"draft positions beyond {longest} are not trained; give longer documents, a longer seq_len or a window of "
        f"{max(2, longest)}"
    )


def choose_ids(tokens: Tensor, vocab_size: int, size: int | None) -> Tensor | None:
    """Return the draft vocabulary of a new head [columns] int64, rising (FR-Spec, 2502.14856); None for all ids.

    These are the most frequent ids of the trained tokens: `size` of them, 0 for all. By default (None) all up to
    ALL_IDS; above, the smallest power of two from FEWEST on whose most frequent ids are COVERAGE of the tokens.
    """
    counts = torch.bincount(tokens.flatten().long(), minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)
    if size is None:
        size = vocab_size if vocab_size <= ALL_IDS else FEWEST
        shares = counts[order].cumsum(0) / counts.sum().clamp(min=1)
        while size < vocab_size and shares[size - 1] < COVERAGE:
            size *= 2
    return None if size == 0 or size >= vocab_size else order[:size].sort().values


def coverage(ids: Tensor, tokens: Tensor) -> float:
    """Return the share of tokens that are among ids."""
    return torch.isin(tokens.flatten().long(), ids).float().mean().item()
