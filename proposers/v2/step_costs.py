"""Milliseconds of a step by batch size and number of drafts, measured by replaying CUDA graphs when an engine starts.

The target is measured as by vLLM's AdaptiveVerificationManager: dummy steps of every captured size with the runner's
timer. A draft is measured by replaying its graph on the padding of the capture. The online plan starts from the sums,
and corrects them by the steps that it observes: contexts are short here, and the host does not wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import build_cost_tables_from_curves

REPLAYS = 5


def measure_costs(runner: Any, arms: Sequence[int]) -> NDArray[np.float64] | None:
    """Return the milliseconds of a step that verifies and drafts K, [max_num_reqs + 1, A]; None without full graphs."""
    batches, graphs = np.arange(runner.max_num_reqs + 1), runner.speculator.graphs
    with runner.maybe_setup_dummy_loras(runner.lora_config), runner.step_timing.collect() as samples:
        for size in runner.cudagraph_manager.captured_token_counts():
            for _ in range(REPLAYS):
                runner._dummy_run(size)
    rows = medians((one.num_target_tokens, one.forward_ms) for one in samples if one.full_cudagraph)
    if not rows:
        return None
    costs = np.empty((len(batches), len(arms)))
    for column, drafts in enumerate(arms):
        captured = [desc for desc in graphs.graphs if desc.num_speculative_tokens == drafts]
        times = ((desc.num_reqs, time_ms(partial(graphs.run_fullgraph, desc))) for desc in captured)
        most = len(batches) * (1 + drafts)
        draft, verify = build_cost_tables_from_curves(medians(times) or [(1, 0.0)], rows, len(batches), most)
        costs[:, column] = draft[batches] + verify[batches * (1 + drafts)]
    return costs


def medians(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the median of each size, the smallest size first."""
    grouped = defaultdict(list)
    for size, milliseconds in points:
        grouped[size].append(milliseconds)
    return [(size, median(found)) for size, found in sorted(grouped.items())]


def time_ms(run: Callable[[], Any]) -> float:
    """Return the median of several runs, by CUDA events."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    events[-1].synchronize()
    return median(start.elapsed_time(end) for start, end in pairwise(events))
