"""Drafts by batch size: schedules, as vLLM's scheduler looks them up, and costs from which the online plan starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm_mtpc.config.mtpc_config import HeadConfig
    from vllm_mtpc.plan.online_plan import Floats

SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
Schedule = list[tuple[int, int, int]]  # (smallest batch, largest batch, drafts), both ends included

LARGEST = 1024  # the largest batch size of a schedule; vLLM keeps the last K for larger ones

# Milliseconds on a CPU core (V1), fitted to `bench serve` of a target with CPU_PRODUCTS multiplications per row, and
# to `benchmarks.steps` of SmolLM2, which has 15 times as many. Only ratios count.
CPU_PRODUCTS = 8.3e6
CPU_STEP = (1.95, 0.28, 0.07)  # a step, + each request, + each row: of any target
CPU_TARGET = (1.5, 0.075)  # the weights are read, + each row is computed: by the target's products
CPU_DRAFT = (0.7, 0.04, 0.145, 0.029)  # drafting and verification, + each request, + each draft, + each of both
GRAPH_ROWS = 512  # of the largest batch that vLLM captures in a CUDA graph by default
BALANCE = 240  # rows that compute as long as the target's weights take to read (H100)
GPU_DRAFT = (0.05, 0.01)  # launches of a draft, + each draft, in the same unit of time
GPU_LENGTHS = 3  # distinct K of PTP: vLLM captures a graph of the target for each K and batch size

ABSENT_RATE = 0.5  # acceptance of a draft that the card does not have


def card_rates(measured: Mapping[str, Sequence[float]], num_drafts: int) -> Floats:
    """Return the acceptance of draft k after accepted drafts, [2, K], from P(the first k accepted) by temperature.

    An absent one of the temperatures "t0" and "t1" takes the values of the other.
    """
    rates = np.full((2, num_drafts), ABSENT_RATE)
    for row, key in zip(rates, ("t0", "t1"), strict=True):
        values = measured.get(key) or next(iter(measured.values()), [])
        for k, (before, value) in enumerate(pairwise([1.0, *values[:num_drafts]])):
            row[k] = value / before if before > 0 else ABSENT_RATE
    return rates.clip(0.02, 0.98)


def draft_arms(num_drafts: int) -> tuple[int, ...]:
    """Return the K to choose from: 0, 1, 3, 7, ... and `num_drafts`; each has graphs of its own on a GPU."""
    return (*(2**i - 1 for i in range(num_drafts.bit_length()) if 2**i - 1 < num_drafts), num_drafts)


def gpu_schedule(num_drafts: int) -> Schedule:
    """Return the maximum number of drafts by batch size on a GPU: those that keep a step in a CUDA graph."""
    arms = draft_arms(num_drafts)
    most = [[k for k in arms if not k or batch * (1 + k) <= GRAPH_ROWS][-1] for batch in range(1, LARGEST + 1)]
    return merge_ranges(most)


def prior_costs(
    arms: Sequence[int],
    ranges: Schedule | None,
    max_num_seqs: int,
    load: float,
    products: float | None = None,
    is_exact: bool = False,
) -> Floats:
    """Return the expected cost of a step that verifies and drafts K of `arms`, [max_num_seqs + 1, A]; ratios count.

    More drafts than `ranges` allows cost infinity; `is_exact`: fewer, but not 0, too. load: see `relative_load`;
    products: `target_products`, on a CPU; None: a roofline, in times that the target's weights take to read.
    """
    most = expand_schedule(ranges, max_num_seqs, max(arms))

    def cost(batch: int, drafts: int) -> float:
        return cpu_cost(batch, drafts, load, products) if products else gpu_cost(batch, drafts, load)

    return np.array(
        [
            [cost(b, k) if k in (0, most[b]) or (k < most[b] and not is_exact) else math.inf for k in arms]
            for b in range(max_num_seqs + 1)
        ]
    )


def expand_schedule(ranges: Schedule | None, max_num_seqs: int, num_drafts: int) -> list[int]:
    """Return the number of drafts of each batch size up to max_num_seqs, as vLLM's scheduler looks them up.

    The schedule begins at batch size 1; a gap between two ranges belongs to the first of them. None: `num_drafts` at
    every batch size. The number at index 0 is unused.
    """
    ranges = ranges or [(1, max_num_seqs, num_drafts)]
    table = [0]
    for end, (_, _, drafts) in zip([low for low, _, _ in ranges[1:]] + [max_num_seqs + 1], ranges, strict=True):
        table += [drafts] * (end - len(table))
    return table[: max_num_seqs + 1]


def target_products(target: Any, width: int, vocab_size: int) -> int:
    """Return the multiplications of a target for one row, from its text config."""
    layer = 4 * width**2 + 3 * width * getattr(target, "intermediate_size", 4 * width)
    return getattr(target, "num_hidden_layers", 1) * layer + vocab_size * width


def relative_load(head: HeadConfig, target: Any) -> float:
    """Return the multiplications of a circuit head for one draft, divided by those of the target for one row."""
    width, products = head.hidden_size, leaf_products(head)
    if (trunk := head.trunk).kind == "backbone":
        attention = 2 * (trunk.heads + trunk.kv_heads) * trunk.head_dim
        products += trunk.layers * width * (attention + 3 * trunk.width)
    elif trunk.kind == "mlp":  # once for all drafts
        products += trunk.layers * 5 * width * trunk.width // (head.window - 1)
    return products / target_products(target, width, head.vocab_size)


def leaf_products(head: HeadConfig) -> int:
    """Return the multiplications of a head's leaves for one draft: r unembeddings, or one and r low-rank terms."""
    columns, r = head.draft_vocab_size or head.vocab_size, head.num_components
    rank = getattr(head.leaves, "component_rank", 0) if r > 1 else 0
    row = columns * head.hidden_size
    return row + r * rank * (head.hidden_size + columns) if rank else r * row


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


def cpu_cost(batch: int, drafts: int, load: float = 0.0, products: float = CPU_PRODUCTS) -> float:
    """Return the milliseconds of a step with `drafts` drafts per request, on the machine of the constants."""
    (step, per_request, per_row), (read, computed) = CPU_STEP, (part * products / CPU_PRODUCTS for part in CPU_TARGET)
    cost = step + read + batch * (per_request + (per_row + computed) * (1 + drafts))
    if drafts:
        draft, per_request, per_draft, per_token = CPU_DRAFT
        cost += draft + load * read + per_request * batch
        cost += drafts * (per_draft + max(per_token, load * computed) * batch)
    return cost


def gpu_cost(batch: int, drafts: int, load: float = 0.0) -> float:
    """Return the cost of a step in times that the weights take to read; BALANCE rows compute as long."""
    launches, per_draft = GPU_DRAFT
    draft = launches + per_draft * drafts + load * max(1.0, batch * drafts / BALANCE) if drafts else 0.0
    return max(1.0, batch * (1 + drafts) / BALANCE) + draft
