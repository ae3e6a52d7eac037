"""Tensor-parallel ranks over gloo without an engine, for functions that run in forks of "v2" (forks.py)."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 1090  # divided into 2 x 576 columns, of which the second rank has 514 tokens
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "capped": {"soft_cap": 5.0, "scale": 0.7}}


class Target(nn.Module):
    """vLLM's layers of `compute_logits`, with the options of `kind`."""

    kind = "plain"

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        super().__init__()
        whole = torch.randn(vocab_size, hidden_size, generator=torch.Generator().manual_seed(5))
        self.lm_head = ParallelLMHead(vocab_size, hidden_size)
        self.lm_head.weight_loader(self.lm_head.weight, whole)
        self.lm_head.quant_method.process_weights_after_loading(self.lm_head)
        self.logits_processor = LogitsProcessor(vocab_size, **KINDS.get(self.kind, {}))

    def compute_logits(self, states: Tensor) -> Tensor:
        logits = self.logits_processor(self.lm_head, states)
        if self.kind == "forbids a token":
            logits[:, VOCAB - 2] = -torch.inf
        return logits


def on_ranks(num_ranks: int, place: Path, store: Path, timeout: float, call: Callable[..., Any], *args: Any) -> list:
    """`call(rank, *args)` of every rank, each in a fork of this process; raises TimeoutError where one takes longer.

    place: a folder with `target`. store: a file that does not exist.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    ranks = [
        context.Process(target=_rank, args=(rank, num_ranks, place, store, pipes[rank][1], call, *args))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    for _, theirs in pipes:
        theirs.close()
    answers = []
    for rank, (ours, _) in enumerate(pipes):
        if not ours.poll(timeout):
            raise TimeoutError(f"rank {rank} has not answered in {timeout:g} s")
        answers.append(pickle.loads(ours.recv_bytes()))
    return answers


def _rank(rank: int, num_ranks: int, place: Path, store: Path, answers: Any, call: Callable, *args: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    from tests.support.configs import engine_config

    torch.set_num_threads(1)
    os.environ["VLLM_DIST_IDENT"] = str(os.getppid())  # as vLLM's worker does: on AVX-512 ranks share memory by name
    with set_current_vllm_config(engine_config(place / "target", None)):
        parallel_state.init_distributed_environment(num_ranks, rank, f"file://{store}", rank, "gloo")
        parallel_state.ensure_model_parallel_initialized(num_ranks, 1)
        answers.send_bytes(pickle.dumps(call(rank, *args)))
