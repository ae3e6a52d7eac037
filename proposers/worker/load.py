"""Load a head in a worker, with access to the lm_head and embeddings of the target or drafter where it reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    model_parallel_is_initialized,
    tensor_model_parallel_all_gather,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.heads.head import Head
from vllm_mtpc.heads.leaves.own import OwnLeaves, Shard, is_sharded
from vllm_mtpc.proposers.options.switches import logger, reason

UNITS = 64  # states whose logits are computed at once to read the rows of an lm_head
# A product with these rows: of states this large, which a soft cap would bend, the logits differ by no more than this
# share of the largest, which leaves room for bfloat16 and for quantised states.
LARGE, SAME = 100.0, 0.05
_gather = partial(tensor_model_parallel_all_gather, dim=0)


class DrafterLmHead(nn.Module):
    """The lm_head of a model of vLLM without the norm that some (DeepSeek, GLM) apply in `compute_logits`.

    model: the drafter; hidden_size, dtype: of its states.
    """

    def __init__(self, model: nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = (model,)  # in a tuple: no submodule
        self.processor = next(part for part in model.modules() if isinstance(part, LogitsProcessor))
        calls: list[tuple[Any, ...]] = []
        with self.processor.register_forward_pre_hook(lambda _, args: calls.append(args)):
            model.compute_logits(torch.zeros(1, hidden_size, dtype=dtype, device=next(model.parameters()).device))
        self.lm_head: nn.Module = calls[0][0]

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return the logits of normalised states [R, D]."""
        return self.processor(self.lm_head, states)

    def normalised(self, states: Tensor) -> Tensor:
        """Return what the lm_head multiplies for states [R, D] of the drafter's forward pass."""
        self.processor.forward = lambda lm_head, states, *args, **kwargs: states
        try:
            return self.model[0].compute_logits(states)
        finally:
            del self.processor.forward


def log_drafts(vllm_config: Any, graphs: str) -> None:
    """Log one line on the first rank: model runner, CUDA graphs of target and drafts (`graphs`), the head's options."""
    spec, is_v2 = vllm_config.speculative_config, vllm_config.use_v2_model_runner
    mode = vllm_config.compilation_config.cudagraph_mode.name
    line = f"Model Runner V{1 + is_v2}, CUDA graphs of the target: {mode}, of drafts: {graphs}; {spec!r}"
    init_logger(logger.name).info_once("%s; %s", line, spec.describe_drafts(), scope="global")


def load_served_head(
    spec: Any, dtype: torch.dtype, device: torch.device, target_model: nn.Module, target_dtype: torch.dtype
) -> Head:
    """Load the head of a speculative config; raises on every rank if loading fails on one.

    Args:
        dtype: of the weights where `head_dtype` is "auto".
        target_model, target_dtype: vLLM's model, whose lm_head and embeddings are lent, and the dtype of its states.
    """

    def load() -> Head:  # runs no collective
        num_ranks = get_tensor_model_parallel_world_size() if model_parallel_is_initialized() else 1
        # rows are dropped before the head is moved: the device needs no room for them
        place = "cpu" if num_ranks > 1 else device
        _, head = load_head(spec.model_folder, weights_dtype(spec.head_dtype, dtype), place)
        leaves = head.leaves
        has_rows = isinstance(leaves, OwnLeaves) and not leaves.skip  # without x_1 they are not gathered
        if has_rows and is_sharded(leaves.leaf_weight.nbytes, num_ranks, device.type):
            rank = get_tensor_model_parallel_rank()
            leaves.shard_leaves(Shard(rank, num_ranks, head.columns, _gather))
            logger.info("Unembeddings of the head: rows of rank %d of %d", rank, num_ranks)
        head.to(device)
        if device.type == "cpu":
            head.pack(spec.num_speculative_tokens + 1)
        return head

    head = succeed_together(load)
    if head.trunk.needs_embedding:
        head.trunk.bind_embedding(target_model.embed_input_ids)
    if head.leaves.needs_lm_head:
        lm_head = _lm_head(target_model.compute_logits, target_dtype, head.vocab_size)
        head.leaves.bind_lm_head(_lm_head_of(lm_head, head, target_dtype, device) if head.vocabulary else lm_head)
    return head


def succeed_together(call: Callable[[], Head]) -> Head:
    """Return the head of `call` once it has returned on every rank; raise its error, or that of another rank."""
    if not model_parallel_is_initialized() or (group := get_tp_group()).world_size == 1:
        return call()
    error = None
    try:
        head = call()
    except Exception as raised:
        error = raised
    lines: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(lines, error and reason(error), group=group.cpu_group)
    if error is not None:
        raise error
    if failed := next((f"on rank {rank}: {line}" for rank, line in enumerate(lines) if line), None):
        raise RuntimeError(failed)
    return head


def kept(tensors: Iterable[Tensor]) -> nn.Module:
    """Return a module with these tensors as buffers, which vLLM restores after a sleep of level 2."""
    module = nn.Module()
    for index, tensor in enumerate(tensors):
        module.register_buffer(str(index), tensor.data, persistent=False)
    return module


def weights_dtype(head_dtype: str, default: torch.dtype) -> torch.dtype:
    """Return the dtype that the option `head_dtype` names; auto: the default."""
    return default if head_dtype == "auto" else getattr(torch, head_dtype)


@torch.inference_mode()
def _lm_head_of(
    lm_head: Callable[[Tensor], Tensor], head: Head, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Return `lm_head` [..., D] -> [..., V] for the head's ids alone, by their rows, which every rank has.

    The rows are the logits of unit vectors, whatever lm_head is divided or quantised how. Where it is no product
    with these rows (a soft cap), all logits are computed.
    """
    assert head.vocabulary is not None
    ids, size = head.vocabulary.ids, head.hidden_size
    rows = torch.empty(len(ids), size, dtype=dtype, device=device)
    for start in range(0, size, UNITS):
        units = torch.zeros(min(UNITS, size - start), size, dtype=dtype, device=device)
        units.diagonal(start).fill_(1)
        rows[:, start : start + UNITS] = lm_head(units)[:, ids].T
    states = LARGE * torch.randn(2, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    found, wanted = nn.functional.linear(states, rows).float(), lm_head(states)[:, ids].float()
    if (found - wanted).abs().max() > SAME * wanted.abs().max():
        logger.info("Logits of the head: all %d are computed, of which it has %d", head.vocab_size, len(ids))
        return lambda states: lm_head(states)[..., ids]
    if device.type == "cpu":  # torch multiplies a few rows at a third of the speed
        layer: Any = nn.Module()
        layer.weight = nn.Parameter(rows, requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        product = partial(layer.cpu_linear, weight=layer.weight, bias=None)
    else:
        head.lm_head_rows, product = kept([rows]), partial(nn.functional.linear, weight=rows)

    def logits(states: Tensor) -> Tensor:  # as one matrix: a view of several dimensions becomes many small products
        return product(states.to(dtype).reshape(-1, size)).view(*states.shape[:-1], len(ids))

    return logits


def _lm_head(
    compute_logits: Callable[[Tensor], Tensor], target_dtype: torch.dtype, vocab_size: int
) -> Callable[[Tensor], Tensor]:
    """Return vLLM's `compute_logits` for states [..., D] of any dtype: logits [..., V] without padding."""

    def logits(states: Tensor) -> Tensor:
        flat = compute_logits(states.reshape(-1, states.shape[-1]).to(target_dtype))
        return flat[:, :vocab_size].view(*states.shape[:-1], vocab_size)

    return logits
