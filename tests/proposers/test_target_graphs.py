"""CUDA graphs of the target that vLLM would capture with a default schedule, counted from the configuration alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationConfig, VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from tests.support.configs import ptp_config
from vllm_mtpc.plan import draft_schedule as schedule
from vllm_mtpc.proposers.config import ptp_options as config_ptp

MAX_NUM_SEQS = 1024  # vLLM's default on a GPU of 80 GB and more


def num_graphs(ranges: schedule.Schedule | None, num_drafts: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Graphs of vLLM's manager with the sizes that vLLM chooses for a GPU."""
    compilation = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    config = SimpleNamespace(
        compilation_config=compilation,
        model_config=SimpleNamespace(enforce_eager=False),
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=8192),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        num_speculative_tokens=num_drafts,
        uniform_decode_query_len=1 + num_drafts,
        performance_mode="balanced",
        speculative_config=SimpleNamespace(
            num_speculative_tokens_per_batch_size=ranges, uses_dynamic_speculative_decoding=lambda: ranges is not None
        ),
    )
    VllmConfig._set_cudagraph_sizes(config)
    last_stage = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: last_stage)
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None, raising=False)
    manager = cudagraph_utils.CudaGraphManager(
        config, torch.device("cpu"), compilation.cudagraph_mode, config.uniform_decode_query_len
    )
    return len(manager._capture_descs[CUDAGraphMode.FULL])


def lengths(ranges: schedule.Schedule) -> set[int]:
    return {drafts for _, _, drafts in ranges}


@pytest.mark.parametrize("num_drafts", [1, 3, 7, 15, 31])
def test_default_schedule_captures_few_graphs(num_drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sizes up to 512 tokens are about 50 graphs for each length, also for a length that is never scheduled."""
    ranges = schedule.default_schedule([], num_drafts, is_cpu=False)
    assert len(lengths(ranges)) <= schedule.GPU_LENGTHS
    assert all(high * (1 + drafts) <= schedule.GPU_FEW_ROWS for _, high, drafts in ranges if drafts)
    assert num_graphs(ranges, num_drafts, monkeypatch) <= 160


def test_every_length_of_a_schedule_costs_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule of six lengths, to compare with the count above."""
    six = [(1, 8, 7), (9, 16, 5), (17, 32, 3), (33, 64, 2), (65, 128, 1), (129, MAX_NUM_SEQS, 0)]
    assert num_graphs(None, 7, monkeypatch) == 48
    assert num_graphs(six, 7, monkeypatch) > 250


@pytest.mark.parametrize(("variant", "draft_pass"), [("o-ptp", "merged"), ("c-ptp", "two-pass")])
def test_default_schedule_of_ptp_has_few_lengths(
    variant: str, draft_pass: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ptp_config(variant, draft_pass, None)
    every = spec.default_schedule()
    monkeypatch.setattr(config_ptp, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    few = spec.default_schedule()
    assert len(lengths(few)) == schedule.GPU_LENGTHS < len(lengths(every))
    assert (few[0][2], few[-1][2]) == (every[0][2], every[-1][2])


def test_limit_lengths_keeps_the_longest_drafts() -> None:
    assert schedule.limit_lengths([7, 7, 5, 4, 4, 4, 0]) == [7, 7, 4, 4, 4, 4, 0]
    assert schedule.limit_lengths([7, 2, 0]) == [7, 2, 0]
