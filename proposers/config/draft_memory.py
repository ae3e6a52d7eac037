"""Device memory of a served head in bytes, computed before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.linear import LinearHead, pays
from vllm_mtpc.kernels.draft import is_small
from vllm_mtpc.kernels.shard import Shard

if TYPE_CHECKING:
    from vllm_mtpc.config.mtpc_config import HeadConfig
    from vllm_mtpc.heads.base import Head

LOGITS_BYTES = 1 << 30  # of a draft that exist at once; larger batches are drafted in several goes


class DraftMemory(NamedTuple):
    """Bytes on one rank."""

    weights: int  # the head's parameters and buffers
    buffers: int  # made at start: conditionals of the last drafts, a row per request
    activation: int  # logits of the largest draft


def logits_bytes(head: Head, drafts: int, dtype: torch.dtype) -> int:
    """Return the bytes of a request's logits [1, 1 + K, r, V], and of those of x_1 in float32."""
    shard, r = head.leaf_shard, head.circuit.num_components
    columns = shard.rows if shard else head.vocab_size
    base = columns * (1 + drafts) if head.component_rank else 0  # logits [1, 1 + K, V]
    position, drafted = r * columns, drafts * r * columns
    conditionals = drafts * shard.rows * (1 + shard.size) if shard else 0  # [1, K, V], own and of all ranks
    return (base + position + drafted + conditionals) * dtype.itemsize + position * torch.float32.itemsize


def rows_at_once(
    head: Head,
    drafts_by_batch: Sequence[int],
    num_drafts: int,
    logits_dtype: torch.dtype,
    graph_sizes: Sequence[int] = (),
) -> dict[int, int]:
    """Return the largest batch with K drafts whose logits fit in LOGITS_BYTES by K, the largest draft first.

    Args:
        drafts_by_batch, num_drafts: K by batch size (index 0 is unused), and K where no batch has drafts.
        graph_sizes: batch sizes of CUDA graphs, to which batches are padded.
    """
    largest = {drafts: batch for batch, drafts in enumerate(drafts_by_batch) if batch and drafts} or {num_drafts: 1}
    row_bytes = {drafts: logits_bytes(head, drafts, logits_dtype) for drafts in largest}
    rows = {}
    for drafts, batch in largest.items():
        padded = min((size for size in graph_sizes if batch <= size < len(drafts_by_batch)), default=batch)
        rows[drafts] = min(padded, max(1, LOGITS_BYTES // row_bytes[drafts]))
    return dict(sorted(rows.items(), key=lambda item: item[1] * row_bytes[item[0]], reverse=True))


def draft_memory(
    config: HeadConfig,
    drafts_by_batch: Sequence[int],
    num_drafts: int,
    dtype: torch.dtype,
    num_ranks: int = 1,
    device_type: str = "cuda",
    is_drawn: bool = True,
) -> DraftMemory:
    """Return the memory on one rank of Model Runner V2 for head_dtype auto.

    Args:
        config, dtype: of the head, and of the target.
        drafts_by_batch, num_drafts: K by batch size up to max_num_seqs (index 0 is unused), and the largest K.
        num_ranks, device_type: tensor-parallel ranks, and "cuda" or "cpu".
        is_drawn: whether drafts are sampled; greedy drafts store no conditionals.
    """
    with torch.device("meta"):
        head = build_head(config).to(dtype)
        shard = Shard(0, num_ranks, config.vocab_size, lambda own: own)
        if isinstance(head, LinearHead) and pays(head.leaf_weight.numel() * dtype.itemsize, num_ranks, device_type):
            head.shard_leaves(shard)
        if head.needs_lm_head and divides_logits(head, num_ranks):
            head.bind_lm_head(lambda states: states, shard)
    weights = sum(part.nbytes for part in (*head.parameters(), *head.buffers()))
    drafts, rows = next(iter(rows_at_once(head, drafts_by_batch, num_drafts, dtype).items()))
    cached = config.vocab_size * dtype.itemsize if is_drawn else 0
    # per draft: token, confidence, conditional; per request: slot, temperature, seed, row, first token, position, state
    states = config.window if config.head == "backbone" else 1
    row = num_drafts * (8 + 4 + cached) + 8 + 4 + 4 * 8 + states * config.hidden_size * dtype.itemsize
    buffers = (len(drafts_by_batch) - 1) * row + 4 * num_drafts
    return DraftMemory(weights, buffers, rows * logits_bytes(head, drafts, dtype))


def divides_logits(head: Head, num_ranks: int) -> bool:
    """Return whether each rank keeps its columns of the logits, which pays for large leaves."""
    return num_ranks > 1 and not is_small(head.circuit.num_components, head.vocab_size)
