"""vLLM's Model Runner V2 with our speculators."""

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
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import build_cost_tables_from_curves

from vllm_mtpc.plan.draft_schedule import SCHEDULE_KEY
from vllm_mtpc.proposers.worker.counts import COSTS
from vllm_mtpc.proposers.worker.grammar_masks import StructuredRequests

REPLAYS = 5  # of each graph that is measured


def speculator_class(spec: Any) -> type:
    """Return the class that `spec.speculator()` names."""
    return resolve_obj_by_qualname(f"vllm_mtpc.proposers.v2.{spec.speculator()}")


class RowLoraState(LoraState):
    """Names the adapter of each row with logits; vLLM 0.32 names one per request, whose drafts have rows too."""

    rows: Any = None  # [R], rows with logits of each request

    def make_lora_inputs(self, req_ids: list[str], idx_mapping: Any, num_scheduled_tokens: Any, *args: Any) -> Any:
        adapters, *rest = super().make_lora_inputs(req_ids, idx_mapping, num_scheduled_tokens, *args)
        if self.rows is not None:
            adapters = tuple(self.lora_ids[idx_mapping].repeat(self.rows))
        return (adapters, *rest)


class HeadModelRunner(GPUModelRunner):
    """Additions to the V2 runner of any device."""

    costs: Any = None  # of steps, that the scheduler has not received

    def begin(self) -> None:
        spec = self.speculative_config
        if spec.reads_aux:  # the target returns the states that draft layers read
            self.use_aux_hidden_state_outputs = True
        if self.lora_config:
            self.lora_state = RowLoraState(self.max_num_reqs)
        if self.speculator is not None and spec.mask_drafts:  # None: not the last pipeline stage
            self.speculator.structured = StructuredRequests(self.vllm_config, self.req_states)

    def add_requests(self, scheduler_output: Any) -> None:
        super().add_requests(scheduler_output)
        if (structured := getattr(self.speculator, "structured", None)) is not None:
            structured.add(scheduler_output.scheduled_new_reqs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if self.costs is not None and output is not None:
            setattr(getattr(output, "model_runner_output", output), COSTS, self.costs)
            self.costs = None
        return output

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Have graphs of the target for every K of the online plan: vLLM captures those that its schedule has."""
        spec, own = self.speculative_config, getattr(self.speculative_config, SCHEDULE_KEY)
        if own and spec.arms:
            most_first = spec.arms[-1], *spec.arms[:-1]
            shown = [(batch, batch, drafts) for batch, drafts in enumerate(most_first, start=1)]
            object.__setattr__(spec, SCHEDULE_KEY, shown)  # past the validation of assignments
        try:
            super().initialize_kv_cache(*args, **kwargs)
        finally:
            object.__setattr__(spec, SCHEDULE_KEY, own)

    def capture_model(self, **kwargs: Any) -> int:
        """Capture, and measure steps for the online plan; not across pipeline stages, which wait for each other."""
        size, arms = super().capture_model(**kwargs), self.speculative_config.arms
        if kwargs.get("profile_only") and self.speculator is not None:
            self.speculator.drop_profiled_graphs()
        has_graphs = getattr(getattr(self.speculator, "graphs", None), "graphs", None)
        if has_graphs and arms and self.vllm_config.parallel_config.pipeline_parallel_size == 1:
            self.costs = None if kwargs.get("profile_only") else measure_costs(self, arms)
        return size

    def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        input_batch = super().prepare_inputs(scheduler_output, *args, **kwargs)
        if isinstance(self.lora_state, RowLoraState):
            ends = input_batch.cu_num_logits_np
            self.lora_state.rows = ends[1:] - ends[:-1]
        if self.speculator is not None:
            self.speculator.next_drafts = scheduler_output.num_spec_tokens_to_schedule
        return input_batch


def measure_costs(runner: Any, arms: Sequence[int]) -> NDArray[np.float64] | None:
    """Return the milliseconds of a step that verifies and drafts K, [max_num_reqs + 1, A]; None without full graphs.

    The target is measured as by vLLM's AdaptiveVerificationManager: dummy steps of every captured size with the
    runner's timer; a draft by replaying its graph on the padding of the capture. The online plan starts from the sums,
    and corrects them by the steps that it observes: contexts are short here, and the host does not wait.
    """
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
