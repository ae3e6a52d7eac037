"""What a head takes of a device's memory while it is served, in bytes, known before anything is loaded.

The head, the kernels' buffers and a draft's products are made on torch's "meta" device, where tensors have a shape and
no contents, and what lives at once is counted: no size is written down a second time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.backbone import BackboneHead
from vllm_mtpc.heads.linear import LinearHead, pays
from vllm_mtpc.kernels.draft import is_small, naive
from vllm_mtpc.kernels.filter import MAX_COMPONENTS
from vllm_mtpc.kernels.shard import Shard

if TYPE_CHECKING:
    from vllm_mtpc.heads.base import Head

# Logits of a draft that exist at once, and the float32 ones of x_1; larger batches are drafted in several goes. At
# V=128,256 and r=8 in bfloat16 each batch of the default schedule on a GPU is one go: 192 positions, 1,536 rows of the
# lm_head, many times what keeps a GPU busy with one product.
LOGITS_BYTES = 1 << 30
VOCAB_PADDING = 64  # of vLLM's lm_heads


class DraftMemory(NamedTuple):
    """Bytes on one rank."""

    weights: int  # the head's parameters and buffers
    buffers: int  # made at start: conditionals of the last drafts, a row per request
    activation: int  # at once during the largest draft, next to both


def by_batch(ranges: Sequence[tuple[int, int, int]] | None, max_num_seqs: int, num_drafts: int) -> list[int]:
    """Drafts of each batch size up to max_num_seqs, as vLLM's scheduler looks them up; [0] means nothing.

    ranges: (smallest batch, largest batch, drafts), from batch 1 on; what is between two is the former's. None:
    num_drafts in all.
    """
    ranges = ranges or [(1, max_num_seqs, num_drafts)]
    table = [0]
    for end, (_, _, drafts) in zip([low for low, _, _ in ranges[1:]] + [max_num_seqs + 1], ranges, strict=True):
        table += [drafts] * (end - len(table))
    return table[: max_num_seqs + 1]


def rows_at_once(
    head: Head,
    drafts_by_batch: Sequence[int],
    num_drafts: int,
    logits_dtype: torch.dtype,
    graph_sizes: Sequence[int] = (),
) -> dict[int, int]:
    """Requests that are drafted for at once, by their number of drafts, the largest draft first.

    As many as drafts_by_batch[n] (drafts of a batch of n; [0] means nothing) gives so many, and LOGITS_BYTES hold; one
    at least; CUDA graphs pad batches to graph_sizes. num_drafts: what is said where no batch gets a draft.
    """
    largest = {drafts: batch for batch, drafts in enumerate(drafts_by_batch) if batch and drafts} or {num_drafts: 1}
    largest = {
        drafts: min((size for size in graph_sizes if batch <= size < len(drafts_by_batch)), default=batch)
        for drafts, batch in largest.items()
    }

    def size(drafts: int) -> int:
        """Bytes of the logits [1, 1 + K, r, V] of a request, and of those of x_1 in float32 next to them.

        What components have in common, [1, 1 + K, V], is next to them too. A rank that has some columns
        only has the conditionals [1, K, V] next to them twice: its own, and all.
        """
        shard, r = head.leaf_shard, head.circuit.num_components
        columns = shard.rows if shard else head.vocab_size
        base = columns * (1 + drafts) if head.component_rank else 0
        position, drafted = r * columns, drafts * r * columns
        conditionals = drafts * shard.rows * (1 + shard.size) if shard else 0
        logits = base + position + drafted + conditionals
        return logits * logits_dtype.itemsize + position * torch.float32.itemsize

    rows = {drafts: min(batch, max(1, LOGITS_BYTES // size(drafts))) for drafts, batch in largest.items()}
    return dict(sorted(rows.items(), key=lambda item: item[1] * size(item[0]), reverse=True))


def draft_memory(
    config: Any,  # a HeadConfig
    drafts_by_batch: Sequence[int],
    num_drafts: int,
    dtype: torch.dtype,
    num_ranks: int = 1,
    device_type: str = "cuda",
    is_drawn: bool = True,
) -> DraftMemory:
    """Memory on one rank of Model Runner V2, for a target in `dtype` and head_dtype auto.

    drafts_by_batch as in `rows_at_once`, one entry for each batch size up to max_num_seqs. is_drawn: False where
    draft_sample_method is greedy, and no conditionals are kept to verify drafts with.
    """
    with torch.device("meta"), torch.inference_mode():
        head = build_head(config).to(dtype)
        if isinstance(head, LinearHead) and pays(head.leaf_weight.numel() * dtype.itemsize, num_ranks, device_type):
            head.shard_leaves(Shard(0, num_ranks, config.vocab_size, lambda own: torch.cat([own] * num_ranks)))
        if head.needs_lm_head:
            head.bind_lm_head(*_lm_head(config.vocab_size, num_ranks, divides_logits(head, num_ranks)))
        found = rows_at_once(head, drafts_by_batch, num_drafts, dtype)
        drafts, rows = next(iter(found.items()))
        hidden, first = torch.empty(rows, config.hidden_size, dtype=dtype), torch.empty(rows, dtype=torch.int64)
        drafter, circuit = None, head.circuit
        if circuit.num_components <= MAX_COMPONENTS:  # what launches the kernels, as in `proposers/v2/speculator.py`
            from vllm_mtpc.kernels.draft.kernel import Drafter  # importing it imports triton

            sizes = circuit.program, circuit.num_components, config.vocab_size
            drafter = Drafter(*sizes, torch.device("meta"), None, shard=head.leaf_shard)
        with LiveBytes() as live:
            if isinstance(head, BackboneHead):
                hidden = _passed(head, rows, dtype)
            params = head.draft_params(hidden, first, drafts)
            if drafter is None:
                naive.draft(circuit.program, *params, pick=lambda log_q, k: log_q.argmax(dim=-1), shard=head.leaf_shard)
            elif not drafter.one_launch:
                drawn_dtype, has_bigram = dtype if is_drawn else None, params.bigram is not None
                held = drafter.buffers(rows, drafts, hidden.device, drawn_dtype, has_bigram)
                if held[-1] is not None:
                    head.leaf_shard.gather(held[-1].flatten(1))
        weights = sum(part.nbytes for part in (*head.parameters(), *head.buffers()))
        buffers = drafter.program.nbytes if drafter else 0
    requests = len(drafts_by_batch) - 1
    cached = config.vocab_size * dtype.itemsize if is_drawn else 0
    # per draft: token, confidence, conditional; per request: slot, temperature, seed, row, first token, position, state
    row = num_drafts * (8 + 4 + cached) + 8 + 4 + 4 * 8 + hidden[0].nbytes
    return DraftMemory(weights, buffers + requests * row + 4 * num_drafts, live.peak)


def _passed(head: BackboneHead, rows: int, dtype: torch.dtype) -> Tensor:
    """What the head reads of each request, made by its backbone's pass, whose context is in the KV cache."""
    count, backbone = head.num_queries, head.backbone
    queries, position = torch.empty(rows, count, head.hidden_size, dtype=dtype), torch.empty(rows, count)
    context = backbone.context(torch.empty(rows, 0, backbone.fc.in_features, dtype=dtype), torch.empty(rows, 0))
    return backbone(queries, position, context, torch.empty(rows, 1, count, count, dtype=torch.bool))


def divides_logits(head: Head, num_ranks: int) -> bool:
    """Whether each rank keeps its columns of the logits: not of small leaves."""
    return num_ranks > 1 and not is_small(head.circuit.num_components, head.vocab_size)


def _lm_head(vocab_size: int, num_ranks: int, is_divided: bool) -> tuple[Callable[[Tensor], Tensor], Shard | None]:
    """Return a stand-in for `compute_logits` of vLLM with the same allocations, and the shard of a rank.

    Logits that are not divided are gathered from all ranks.
    """
    padded = -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING
    shard = Shard(0, num_ranks, vocab_size, lambda own: torch.cat([own] * num_ranks), padded)

    def logits(states: Tensor) -> Tensor:
        flat = states.reshape(-1, states.shape[-1])  # a copy where the head's product left them in another order
        columns = flat.new_empty(len(flat), shard.rows)
        if num_ranks > 1 and not is_divided:
            columns = columns.new_empty(num_ranks, *columns.shape).movedim(0, 1).reshape(len(flat), -1)
        width = shard.rows if is_divided else vocab_size
        return columns[:, :width].view(*states.shape[:-1], width)

    return logits, shard if is_divided else None


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made while it is entered and still alive; `peak`: the most at once."""

    now = peak = 0

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(part.untyped_storage()) for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)}
        out = func(*args, **(kwargs or {}))
        for part in tree_leaves(out):
            storage = part.untyped_storage() if isinstance(part, Tensor) else None
            if storage is None or id(storage) in given or storage in self.storages:
                continue
            self.storages.add(storage)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, storage.nbytes())
        return out

    def _drop(self, size: int) -> None:
        self.now -= size
