"""Drafts by batch size: `num_speculative_tokens_per_batch_size`, what a user may write and what holds otherwise.

A draft saves a step where the machine waits for weights and costs one where it computes, so K falls as batches grow.
vLLM's scheduler looks K up by the number of requests of a step; 0: no drafts, and the head is not run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm_mtpc.errors import ServeConfigError

if TYPE_CHECKING:
    from vllm_mtpc.config.mtpc_config import HeadConfig

KEY = "num_speculative_tokens_per_batch_size"
Schedule = list[tuple[int, int, int]]  # (smallest batch, largest batch, drafts), both ends included

ASSUMED = 0.5  # chance of a further draft to be accepted, for a head that was never measured
LARGEST = 1024  # batch size up to which a default is worked out; vLLM keeps the last K beyond
MARGIN = 1.1  # expected gain below which nothing is drafted: costs are known to 6 %, and batches that run out cost 5 %

# Milliseconds on one of two CPU cores (packaged demo target in float32, vLLM's V1 runner; fitted to the steps of `bench
# serve --demo`, 1 to 16 clients). Only ratios count.
CPU_STEP = (3.45, 0.28, 0.145)  # a step, + each request, + each row
CPU_DRAFT = (0.7, 0.04, 0.145, 0.029)  # drafting and verifying at all, + each request, + each draft, + each of both
GPU_ROWS, GPU_FEW, GPU_FEW_ROWS = 128, 2, 192  # rows of a step up to which all is drafted, and so few
GPU_LENGTHS = 3  # distinct K: vLLM captures a graph of the target for each K and size, whether they meet or not


def chosen(given: Any, num_drafts: int) -> Schedule | None:
    """The user's schedule, checked; None for "off" and false. Raises ServeConfigError, one line."""
    if given is False or given == "off":
        return None
    from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

    try:
        if not isinstance(given, (list, tuple)):
            raise ValueError(f"is a {type(given).__name__}")
        for entry in given:
            if not isinstance(entry, (list, tuple)) or [type(number) for number in entry] != [int] * 3:
                raise ValueError(f"{entry!r} is not three whole numbers")
            if entry[2] > num_drafts:
                raise ValueError(f"{entry[2]} drafts are more than num_speculative_tokens")
        return validate_and_normalize_dynamic_sd_schedule([tuple(entry) for entry in given])
    except ValueError as error:
        raise ServeConfigError(
            f"speculative_config: {KEY}={given!r}: {str(error).rstrip('.')}; allowed are [[smallest batch, largest "
            f'batch, drafts], ...] from batch 1 on with 0 to {num_drafts} drafts, or "off"; type e.g. '
            f"[[1, 8, {num_drafts}], [9, 9, 0]]"
        ) from None


def default_schedule(
    measured: Collection[Sequence[float]], num_drafts: int, is_cpu: bool, load: float = 0.0
) -> Schedule:
    """The schedule of a user who gives none; `measured`: P(the first k drafts are all accepted), k = 1, 2, ..., at each
    temperature it was measured at. load: multiplications of the head for one draft, by those of the target for a row.

    On a CPU the K of the most tokens per second by this and the costs above, on average over the temperatures;
    0 where one of them would gain less than MARGIN. On a GPU GPU_ROWS and GPU_FEW_ROWS, which nobody has measured: a
    cautious guess that keeps the rows of a step so few that they are computed while weights are read.
    """
    accepted = [_survival(one, num_drafts) for one in measured] or [_survival((), num_drafts)]
    batches = range(1, LARGEST + 1)
    return merged([_cpu_drafts(accepted, n, load) if is_cpu else _gpu_drafts(num_drafts, n) for n in batches])


def load_of(head: HeadConfig, target: Any) -> float:
    """Multiplications of a head for one draft, by those of the target's layers and lm_head for one row.

    target: its config of transformers. Of a head its leaves, and of a backbone's layers a query.
    """
    wide, deep = head.hidden_size, getattr(target, "num_hidden_layers", 1)
    layer = 4 * wide**2 + 3 * wide * getattr(target, "intermediate_size", 4 * wide)
    return (leaf_products(head) + layer_products(head)) / (deep * layer + head.vocab_size * wide)


def leaf_products(head: HeadConfig) -> int:
    """Multiplications of a head's leaves for one draft: r rows of an lm_head, or one and r low-rank terms."""
    r, rank, row = head.num_components, head.component_rank or 0, head.vocab_size * head.hidden_size
    return row + r * rank * (head.hidden_size + head.vocab_size) if rank else r * row


def layer_products(head: HeadConfig) -> int:
    """Multiplications of the layers of a head's backbone for one query."""
    if head.head != "backbone":
        return 0
    attention = 2 * (head.backbone_heads + head.backbone_kv_heads) * head.backbone_head_dim
    return head.backbone_layers * head.hidden_size * (attention + 3 * head.backbone_width)


def in_words(ranges: Schedule | None, num_drafts: int, is_planned: bool = False) -> str:
    """What the schedule means, for the log; is_planned: Model Runner V1 decides step by step."""
    if is_planned:
        return f"0 to {num_drafts} drafts per step, as many as pay by what is observed while serving"
    if ranges is None:
        return f"{num_drafts} drafts per step, at any batch size"
    texts = [f"{drafts or 'none'} at {low}" + (f" to {high}" if high > low else "") for low, high, drafts in ranges]
    texts[-1] = f"{ranges[-1][2] or 'none'} from {ranges[-1][0]} on"
    return f"drafts per step by running requests: {', '.join(texts)}"


def merged(per_batch: Sequence[int]) -> Schedule:
    """Ranges of equal K; per_batch[i] is that of batch size i + 1."""
    ends = [batch for batch, (one, next_) in enumerate(pairwise([*per_batch, None]), start=1) if one != next_]
    return [(before + 1, end, per_batch[end - 1]) for before, end in pairwise([0, *ends])]


def cpu_cost(batch: int, drafts: int, load: float = 0.0) -> float:
    """Milliseconds of one step and its draft on the machine of the constants; what a head multiplies is no cheaper than
    the same work of the target."""
    step, per_request, per_row = CPU_STEP
    cost = step + batch * (per_request + per_row * (1 + drafts))
    if drafts:
        draft, per_request, per_draft, per_token = CPU_DRAFT
        cost += draft + per_request * batch + drafts * (per_draft + max(per_token, load * per_row) * batch)
    return cost


def cpu_gain(accepted: Sequence[float], batch: int, drafts: int, load: float = 0.0) -> float:
    """Expected speed with so many drafts, by that without."""
    return (1 + sum(accepted[:drafts])) * cpu_cost(batch, 0) / cpu_cost(batch, drafts, load)


def _cpu_drafts(accepted: Sequence[Sequence[float]], batch: int, load: float) -> int:
    gains = {k: [cpu_gain(one, batch, k, load) for one in accepted] for k in range(1, len(accepted[0]) + 1)}
    paying = {drafts: sum(each) for drafts, each in gains.items() if min(each) >= MARGIN}
    return max(paying, key=paying.__getitem__, default=0)


def _gpu_drafts(num_drafts: int, batch: int) -> int:
    if batch * (1 + num_drafts) <= GPU_ROWS:
        return num_drafts
    few = min(num_drafts, GPU_FEW)
    return few if batch * (1 + GPU_FEW) <= GPU_FEW_ROWS else 0


def few_lengths(per_batch: Sequence[int]) -> list[int]:
    """per_batch with at most GPU_LENGTHS distinct K, none of them raised: the most, the fewest, and the one between
    that keeps most drafts."""
    found = sorted(set(per_batch))
    if len(found) <= GPU_LENGTHS:
        return list(per_batch)

    def lowered(middle: int) -> list[int]:
        return [max(kept for kept in (found[0], middle, found[-1]) if kept <= drafts) for drafts in per_batch]

    return max((lowered(middle) for middle in found[1:-1]), key=sum)


def _survival(acceptance: Sequence[float], num_drafts: int) -> list[float]:
    """P(the first k drafts are accepted), k = 1 .. num_drafts; what was not measured continues at ASSUMED."""
    known = list(acceptance[:num_drafts])
    while len(known) < num_drafts:
        known.append((known[-1] if known else 1.0) * ASSUMED)
    return known
