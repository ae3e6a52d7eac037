"""The head in a worker: loaded next to the target, and lent the target's lm_head where it needs one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    model_parallel_is_initialized,
    tensor_model_parallel_all_gather,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.base import Head
from vllm_mtpc.heads.linear import LinearHead, pays
from vllm_mtpc.heads.memory import divides_logits
from vllm_mtpc.kernels.shard import Shard
from vllm_mtpc.proposers.heads.ranks import succeed_together

logger = logging.getLogger("vllm.mtpc")


def log_drafts(vllm_config: Any, how: str) -> None:
    """Log once, on the first rank: the model runner, the graphs of target and drafts (how), the head, its drafts."""
    spec, is_v2 = vllm_config.speculative_config, vllm_config.use_v2_model_runner
    mode = vllm_config.compilation_config.cudagraph_mode.name
    line = f"Model Runner V{1 + is_v2}, CUDA graphs of the target: {mode}, of drafts: {how}; {spec!r}"
    init_logger(logger.name).info_once("%s; %s", line, spec.drafts_in_words(is_v2), scope="global")


def load_served_head(
    folder: str,
    dtype: torch.dtype,
    device: torch.device,
    target_model: nn.Module,
    target_dtype: torch.dtype,
    head_dtype: str = "auto",
    num_drafts: int | None = None,
) -> Head:
    """The head of a folder on `device`; `target_model` is vLLM's, whose lm_head it may read.

    head_dtype: "auto" is `dtype`. At most num_drafts (None: all of the window) are drafted. Raises on every rank where
    the head does not load on one.
    """
    config, head = succeed_together(partial(_load, folder, dtype, device, head_dtype, num_drafts))
    if head.needs_lm_head:  # which takes collectives
        is_divided = divides_logits(head, _num_ranks())
        own = _own_columns(target_model, target_dtype, config) if is_divided else None
        head.bind_lm_head(*own or (_lm_head(target_model.compute_logits, target_dtype, config.vocab_size),))
    return head


def _load(
    folder: str, dtype: torch.dtype, device: torch.device, head_dtype: str, num_drafts: int | None
) -> tuple[HeadConfig, Head]:
    """The head on `device`, without the target's lm_head; runs no collective."""
    dtype = weights_dtype(head_dtype, dtype)
    num_ranks = _num_ranks()
    # rows are dropped before the head is moved: the device needs no room for them
    config, head = load_head(folder, dtype, "cpu" if num_ranks > 1 else device)
    if isinstance(head, LinearHead) and pays(head.leaf_weight.nbytes, num_ranks, device.type):
        rank = get_tensor_model_parallel_rank()
        head.shard_leaves(Shard(rank, num_ranks, config.vocab_size, _gather))
        logger.info("Unembeddings of the head: rows of rank %d of %d", rank, num_ranks)
    head.to(device)
    if isinstance(head, LinearHead) and device.type == "cpu":
        head.pack(num_drafts + 1 if num_drafts else config.window)
    return config, head


def kept(tensors: Iterable[Tensor]) -> nn.Module:
    """A part of a speculator's model that has vLLM keep these tensors over a sleep of level 2.

    Whatever else was allocated while models were loaded is lost there; vLLM saves the buffers of the target and of the
    speculator's model. A target's weights are loaded again by whoever woke it up, a head's by nobody.
    """
    module = nn.Module()
    for index, tensor in enumerate(tensors):
        module.register_buffer(str(index), tensor.data, persistent=False)
    return module


def weights_dtype(head_dtype: str, default: torch.dtype) -> torch.dtype:
    return default if head_dtype == "auto" else getattr(torch, head_dtype)


def _num_ranks() -> int:
    return get_tensor_model_parallel_world_size() if model_parallel_is_initialized() else 1


def _gather(own: Tensor) -> Tensor:
    return tensor_model_parallel_all_gather(own, dim=0)


@torch.inference_mode()
def _own_columns(
    target_model: nn.Module, target_dtype: torch.dtype, config: HeadConfig
) -> tuple[Callable[[Tensor], Tensor], Shard] | None:
    """This rank's columns of vLLM's `compute_logits`, as its `compute_logits_local`, which few models have.

    None where `compute_logits` does something else than call a LogitsProcessor once; that is found out by a call.
    """
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def note(processor: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((processor, args, kwargs))

    processors = [part for part in target_model.modules() if isinstance(part, LogitsProcessor)]
    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in processors]
    device = next(target_model.parameters()).device
    states = torch.randn(2, config.hidden_size, generator=torch.Generator().manual_seed(0)).to(device, target_dtype)
    logits = target_model.compute_logits(states)
    for hook in hooks:
        hook.remove()
    if len(calls) != 1 or len(calls[0][1]) < 2:
        return None
    ((processor, (lm_head, _, *args), kwargs),) = calls

    def own(states: Tensor) -> Tensor:
        return processor(lm_head, states, *args, **kwargs, skip_gather=True)

    rank, size, columns = get_tensor_model_parallel_rank(), _num_ranks(), own(states)
    shard = Shard(rank, size, config.vocab_size, _gather, columns.shape[1] * size)
    if not torch.equal(shard.whole(columns), logits[:, : config.vocab_size]):
        return None
    logger.info("Logits of the head: columns of rank %d of %d", rank, size)
    return _lm_head(own, target_dtype, shard.rows), shard


def _lm_head(
    compute_logits: Callable[[Tensor], Tensor], target_dtype: torch.dtype, vocab_size: int
) -> Callable[[Tensor], Tensor]:
    """vLLM's `compute_logits` for states [..., D]: logits [..., V], with the model's scale and soft cap.

    Under tensor parallelism vLLM gathers them on every rank (Platform.use_all_gather), so every rank drafts from the
    same numbers. States take the dtype of the target's own; a quantised or padded lm_head is vLLM's business, and
    padding beyond V is cut.
    """

    def logits(states: Tensor) -> Tensor:
        flat = compute_logits(states.reshape(-1, states.shape[-1]).to(target_dtype))
        return flat[:, :vocab_size].view(*states.shape[:-1], vocab_size)

    return logits
