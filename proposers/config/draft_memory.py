"""Device memory of a served head in bytes, computed before anything is loaded.

The head, the kernels' buffers and the products of a draft are made on torch's "meta" device, and the bytes of all
tensors that are alive at once are counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
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


def weights_of(folder: Path) -> int:
    """Return the bytes of the safetensors in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def rows_at_once(
    head: Head,
    drafts_by_batch: Sequence[int],
    num_drafts: int,
    logits_dtype: torch.dtype,
    graph_sizes: Sequence[int] = (),
) -> dict[int, int]:
    """Return the number of requests drafted for at once by number of drafts K, the largest draft first.

    It is the largest batch with K drafts whose logits fit in LOGITS_BYTES, at least 1.

    Args:
        head: the head.
        drafts_by_batch: K by batch size; index 0 is unused.
        num_drafts: K where no batch has drafts.
        logits_dtype: dtype of the logits.
        graph_sizes: batch sizes of CUDA graphs, to which batches are padded.
    """
    largest = {drafts: batch for batch, drafts in enumerate(drafts_by_batch) if batch and drafts} or {num_drafts: 1}
    largest = {
        drafts: min((size for size in graph_sizes if batch <= size < len(drafts_by_batch)), default=batch)
        for drafts, batch in largest.items()
    }

    def size(drafts: int) -> int:
        """Return the bytes of a request's logits [1, 1 + K, r, V], and of those of x_1 in float32.

        Heads of `component_rank` also have [1, 1 + K, V] logits, and a rank with some of the columns has its own
        conditionals [1, K, V] and those of all ranks.
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
    """Return the memory on one rank of Model Runner V2 for head_dtype auto.

    Args:
        config: a HeadConfig.
        drafts_by_batch: K by batch size up to max_num_seqs; index 0 is unused.
        num_drafts: the largest K.
        dtype: the target's.
        num_ranks: tensor-parallel ranks.
        device_type: "cuda" or "cpu".
        is_drawn: whether drafts are sampled; greedy drafts store no conditionals.
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
    """Return the backbone's output that the head reads; its context is in the KV cache."""
    count, backbone = head.num_queries, head.backbone
    queries, position = torch.empty(rows, count, head.hidden_size, dtype=dtype), torch.empty(rows, count)
    context = backbone.context(torch.empty(rows, 0, backbone.fc.in_features, dtype=dtype), torch.empty(rows, 0))
    return backbone(queries, position, context, torch.empty(rows, 1, count, count, dtype=torch.bool))


def divides_logits(head: Head, num_ranks: int) -> bool:
    """Return whether each rank keeps its columns of the logits, which pays for large leaves."""
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
    """Counts the bytes of live tensors made while it is active; `peak`: the most at once."""

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
