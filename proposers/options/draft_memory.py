"""Memory of drafts: the bytes of their logits, and the rows that are drafted at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_mtpc.heads.head import Head

LOGITS_BYTES = 1 << 30  # of a draft that exist at once; larger batches are drafted in several goes


def logits_bytes(head: Head, drafts: int, dtype: torch.dtype, in_blocks: bool = False) -> int:
    """Return the bytes of a request's logits; in_blocks: as in `Head.draft_params`."""
    r, leaves, columns, at_first = head.circuit.num_components, head.leaves, head.columns, 1 - head.leaves.skip
    in_blocks = in_blocks and (head.columns == head.vocab_size or bool(leaves.skip))  # else evidence is computed first
    base = columns * (at_first + drafts) if leaves.component_rank else 0  # [1, 1 + K, 1, V]
    drafted = 0 if in_blocks and base else drafts * r * columns  # [1, K, r, V]
    has_evidence = not (in_blocks and leaves.needs_lm_head)  # from a float32 copy
    first = at_first * r * columns if has_evidence or not base else 0  # [1, 1, r, V]
    copied = first * torch.float32.itemsize if has_evidence else 0
    return (base + first + drafted) * dtype.itemsize + copied


def rows_at_once(
    head: Head,
    drafts_by_batch: Sequence[int],
    num_drafts: int,
    logits_dtype: torch.dtype,
    graph_sizes: Sequence[int] = (),
    arms: Sequence[int] = (),
    in_blocks: bool = False,
) -> dict[int, int]:
    """Return the largest batch with K drafts whose logits fit in LOGITS_BYTES by K, the largest draft first.

    Args:
        drafts_by_batch, num_drafts: K by batch size (index 0 is unused), and K where no batch has drafts.
        graph_sizes: batch sizes of CUDA graphs, to which batches are padded.
        arms: K of every batch size that has more drafts.
        in_blocks: as in `Head.draft_params`.
    """
    largest = {drafts: batch for batch, drafts in enumerate(drafts_by_batch) if batch and drafts} or {num_drafts: 1}
    for drafts in arms:
        if batches := [batch for batch, most in enumerate(drafts_by_batch) if batch and 0 < drafts <= most]:
            largest[drafts] = batches[-1]
    row_bytes = {drafts: logits_bytes(head, drafts, logits_dtype, in_blocks) for drafts in largest}
    rows = {}
    for drafts, batch in largest.items():
        padded = min((size for size in graph_sizes if batch <= size < len(drafts_by_batch)), default=batch)
        rows[drafts] = min(padded, max(1, LOGITS_BYTES // row_bytes[drafts]))
    return dict(sorted(rows.items(), key=lambda item: item[1] * row_bytes[item[0]], reverse=True))
