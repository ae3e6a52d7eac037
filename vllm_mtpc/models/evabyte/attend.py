"""EVA attention over its two paged caches: what is kept, and what a row reads. Formulas: docs/models.md.

A cache is what vLLM hands to a layer: [blocks, H, N, 2D], keys in the first D numbers, values in the others; N is the
tokens or summaries of a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mtpc.models.evabyte.plan import EvaPlan, Segment, SummaryPlan


def write_tokens(cache: Tensor, key: Tensor, value: Tensor, plan: EvaPlan) -> None:
    """Store key, value [T, H, D] in their slots; padded rows go to the block that nobody owns."""
    cache[plan.token_block, :, plan.token_offset] = torch.cat([key, value], dim=-1).to(cache.dtype)


def write_summaries(
    summaries: Tensor, cache: Tensor, mu: Tensor, phi: Tensor, plan: EvaPlan, places: SummaryPlan
) -> None:
    """Compute and store the summaries of the chunks this step completes, from the tokens in `cache`."""
    tokens = cache[plan.chunk_block, :, plan.chunk_offset]  # [n, C, H, 2D]
    summaries[places.chunk_block, :, places.chunk_state] = summarise(tokens, mu, phi).to(summaries.dtype)


def summarise(tokens: Tensor, mu: Tensor, phi: Tensor) -> Tensor:
    """Summaries [n, H, 2D] float32 of chunks [n, C, H, 2D], with mu, phi [H, D].

    Keys are averaged with softmax(mu k), values with softmax(s (phi k - |k|^2 / 2)), s = D ** -0.5.
    """
    key, value = tokens.float().chunk(2, dim=-1)
    of_keys = (key * mu.float()).sum(-1).softmax(dim=1)
    exponent = (key * phi.float()).sum(-1) - key.square().sum(-1) / 2
    of_values = (exponent * key.shape[-1] ** -0.5).softmax(dim=1)  # [n, C, H]
    return torch.cat([(of_keys[..., None] * key).sum(1), (of_values[..., None] * value).sum(1)], dim=-1)


def attend(query: Tensor, cache: Tensor, summaries: Tensor, plan: EvaPlan, places: SummaryPlan) -> Tensor:
    """Output [T, H, D] of query [T, H, D]: one softmax over what each row sees; 0 for padded rows.

    Plain torch, one segment after the other: what a CPU runs, and any platform without paged attention kernels.
    """
    out = torch.zeros_like(query)
    for segment in plan.segments():
        rows = slice(segment.row, segment.row + segment.num_rows)
        key, value, is_seen = _seen(cache, summaries, plan, places, segment)
        heads_first = query[rows].transpose(0, 1)
        attended = F.scaled_dot_product_attention(heads_first, key.to(query.dtype), value.to(query.dtype), is_seen)
        out[rows] = attended.transpose(0, 1)
    return out


def _seen(
    cache: Tensor, summaries: Tensor, plan: EvaPlan, places: SummaryPlan, segment: Segment
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [H, L, D] that a segment sees, and which of them each row sees [num_rows, L]."""
    first = segment.window * plan.window_size
    num_chunks = first // plan.chunk_size
    earlier = _gather(summaries, places.block_table[segment.request].long(), 0, num_chunks, places.states)
    own = _gather(cache, plan.block_table[segment.request].long(), first, segment.tokens, plan.block_size)
    key, value = torch.cat([earlier, own], dim=1).chunk(2, dim=-1)
    length, rows = num_chunks + segment.tokens, segment.num_rows
    is_seen = torch.ones(rows, length, dtype=torch.bool, device=cache.device).tril(length - rows)
    return key, value, is_seen


def _gather(cache: Tensor, blocks: Tensor, start: int, count: int, per_block: int) -> Tensor:
    """Entries [start, start + count) of a request in a paged cache, [H, count, 2D]."""
    first = start // per_block
    pages = cache[blocks[first : -(-(start + count) // per_block)]]  # [P, H, N, 2D]
    entries = pages.transpose(0, 1).flatten(1, 2)
    return entries[:, start - first * per_block :][:, :count]
