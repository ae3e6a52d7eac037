"""Drafts by batch size, where the user gives no `num_speculative_tokens_per_batch_size`.

A draft saves a step where the device waits for weights, and costs one where it computes: the best number K of drafts
falls as batches grow. vLLM's scheduler looks K up by the number of requests of a step. With K = 0 the head is not run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_mtpc.config.mtpc_config import HeadConfig

KEY = "num_speculative_tokens_per_batch_size"
Schedule = list[tuple[int, int, int]]  # (smallest batch, largest batch, drafts), both ends included

ASSUMED = 0.5  # acceptance of a further draft, for a head that was not measured
LARGEST = 1024  # the largest batch size of a default schedule; vLLM keeps the last K for larger ones
MARGIN = 1.1  # least expected speed-up of drafting: costs are known to 6 %, and batches that shrink cost 5 %

# Milliseconds on a CPU core (packaged demo target, V1; fitted to `bench serve --demo`). Only ratios count.
CPU_STEP = (3.45, 0.28, 0.145)  # a step, + each request, + each row
CPU_DRAFT = (0.7, 0.04, 0.145, 0.029)  # drafting and verification, + each request, + each draft, + each of both
GPU_ROWS, GPU_FEW, GPU_FEW_ROWS = 128, 2, 192  # rows of a step up to which K, or GPU_FEW, drafts are made
GPU_LENGTHS = 3  # distinct K: vLLM captures a graph of the target for each K and batch size


def default_schedule(
    measured: Collection[Sequence[float]], num_drafts: int, is_cpu: bool, load: float = 0.0
) -> Schedule:
    """Return the schedule for a user who gives none.

    On a CPU: the K with the most tokens per second, on average over the temperatures, and 0 where the speed-up at one
    is below MARGIN. On a GPU (not measured): as many as keep the rows of a step below GPU_ROWS or GPU_FEW_ROWS.

    Args:
        measured: at each measured temperature, P(the first k drafts are all accepted), k = 1, 2, ...
        num_drafts: the largest K.
        load: see `relative_load`.
    """
    batches = range(1, LARGEST + 1)
    if not is_cpu:
        return merge_ranges([_gpu_drafts(num_drafts, batch) for batch in batches])
    accepted = [cumulative_acceptance(one, num_drafts) for one in measured or [()]]
    return merge_ranges([_cpu_drafts(accepted, batch, load) for batch in batches])


def expand_schedule(ranges: Schedule | None, max_num_seqs: int, num_drafts: int) -> list[int]:
    """Return the number of drafts of each batch size up to max_num_seqs, as vLLM's scheduler looks them up.

    Args:
        ranges: a schedule from batch size 1 on; a gap between two ranges belongs to the first of them. None:
            `num_drafts` at every batch size.

    Returns:
        max_num_seqs + 1 numbers; the one at index 0 is unused.
    """
    ranges = ranges or [(1, max_num_seqs, num_drafts)]
    table = [0]
    for end, (_, _, drafts) in zip([low for low, _, _ in ranges[1:]] + [max_num_seqs + 1], ranges, strict=True):
        table += [drafts] * (end - len(table))
    return table[: max_num_seqs + 1]


def relative_load(head: HeadConfig, target: Any) -> float:
    """Return the multiplications of a circuit head for one draft, divided by those of the target for one row."""
    width, depth = head.hidden_size, getattr(target, "num_hidden_layers", 1)
    layer = 4 * width**2 + 3 * width * getattr(target, "intermediate_size", 4 * width)
    products = leaf_products(head)
    if head.head == "backbone":
        attention = 2 * (head.backbone_heads + head.backbone_kv_heads) * head.backbone_head_dim
        products += head.backbone_layers * width * (attention + 3 * head.backbone_width)
    return products / (depth * layer + head.vocab_size * width)


def leaf_products(head: HeadConfig) -> int:
    """Return the multiplications of a head's leaves for one draft: r unembeddings, or one and r low-rank terms."""
    r, rank, row = head.num_components, head.component_rank or 0, head.vocab_size * head.hidden_size
    return row + r * rank * (head.hidden_size + head.vocab_size) if rank else r * row


def merge_ranges(per_batch: Sequence[int]) -> Schedule:
    """Return the schedule with K = per_batch[n - 1] at batch size n."""
    ends = [batch for batch, (one, next_) in enumerate(pairwise([*per_batch, None]), start=1) if one != next_]
    return [(before + 1, end, per_batch[end - 1]) for before, end in pairwise([0, *ends])]


def limit_lengths(per_batch: Sequence[int]) -> list[int]:
    """Return per_batch with its largest and smallest K and the one between that keeps the most drafts; none raised."""
    found = sorted(set(per_batch))
    if len(found) <= GPU_LENGTHS:
        return list(per_batch)

    def lowered(middle: int) -> list[int]:
        return [max(kept for kept in (found[0], middle, found[-1]) if kept <= drafts) for drafts in per_batch]

    return max((lowered(middle) for middle in found[1:-1]), key=sum)


def cumulative_acceptance(measured: Sequence[float], num_drafts: int) -> list[float]:
    """Return P(the first k drafts are accepted), k = 1 .. num_drafts, continued by ASSUMED after the measured ones."""
    known = list(measured[:num_drafts])
    while len(known) < num_drafts:
        known.append((known[-1] if known else 1.0) * ASSUMED)
    return known


def cpu_cost(batch: int, drafts: int, load: float = 0.0) -> float:
    """Return the milliseconds of a step with so many drafts per request, on the machine of the constants."""
    step, per_request, per_row = CPU_STEP
    cost = step + batch * (per_request + per_row * (1 + drafts))
    if drafts:
        draft, per_request, per_draft, per_token = CPU_DRAFT
        cost += draft + per_request * batch + drafts * (per_draft + max(per_token, load * per_row) * batch)
    return cost


def cpu_gain(accepted: Sequence[float], batch: int, drafts: int, load: float = 0.0) -> float:
    """Return the expected tokens per second with so many drafts, divided by those without drafts."""
    return (1 + sum(accepted[:drafts])) * cpu_cost(batch, 0) / cpu_cost(batch, drafts, load)


def _cpu_drafts(accepted: Sequence[Sequence[float]], batch: int, load: float) -> int:
    gains = {k: [cpu_gain(one, batch, k, load) for one in accepted] for k in range(1, len(accepted[0]) + 1)}
    useful = {drafts: sum(each) for drafts, each in gains.items() if min(each) >= MARGIN}
    return max(useful, key=useful.__getitem__, default=0)


def _gpu_drafts(num_drafts: int, batch: int) -> int:
    if batch * (1 + num_drafts) <= GPU_ROWS:
        return num_drafts
    return min(num_drafts, GPU_FEW) if batch * (1 + GPU_FEW) <= GPU_FEW_ROWS else 0
