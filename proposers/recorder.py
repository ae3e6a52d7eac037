"""Record the hidden states that a served target computes: an extension of vLLM's worker, for both model runners.

vLLM mixes `Recorder` into its worker (`--worker-extension-cls`) and calls its methods by `collective_rpc`. Nothing of
vLLM is replaced, nothing is drafted. After each step the rows of all scheduled tokens are copied to the host (CUDA:
to pinned memory on a side stream) and kept by request until they are written. Row t of a request is the state after its
token t, after the final norm. The first tensor-parallel rank of the last pipeline stage records.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank

from vllm_mtpc.files import replacing
from vllm_mtpc.heads.trunk.drafter import DRAFTER
from vllm_mtpc.proposers.worker.load import DrafterLmHead


class Recorder:
    """Methods of a worker; arguments are strings, as vLLM's HTTP route passes them."""

    model_runner: Any
    recording: Recording

    def start_recording(self, layers: str) -> None:
        """Record from the next step on; layers: JSON list, their inputs come before the final states.

        DRAFTER among them: the states with which the engine's drafter predicts the token after the next one; then
        texts are prompts alone, as rejected drafts would have rows.
        """
        if get_tensor_model_parallel_rank() == 0:
            self.recording = Recording(self.model_runner, json.loads(layers))

    def write_states(self, path: str, requests: str) -> None:
        """Write the rows of finished requests, in this order, in a thread; raises the error of the last write.

        Args:
            path: of the safetensors file, which appears when it is complete; empty: wait for the last write.
            requests: JSON list of [name of the request, number of its rows].
        """
        if (recording := getattr(self, "recording", None)) is not None and recording.steps:
            recording.write(path, json.loads(requests))


class Recording:
    """Rows of the steps of one model runner (V1 or V2)."""

    def __init__(self, runner: Any, layers: Sequence[int]) -> None:
        self.runner, self.execute, self.steps = runner, runner.execute_model, 0
        self.rows: dict[str, list[Tensor]] = {}  # [scheduled tokens, W] of each step, by request
        self.writer, self.last_write = ThreadPoolExecutor(1), Future[None]()
        self.last_write.set_result(None)
        self.stream = torch.cuda.Stream() if runner.device.type == "cuda" else None
        self.step: tuple[Any, ...] | None = None  # the arguments of `keep` of a step whose drafter did not run yet
        self.has_drafter = DRAFTER in layers
        if self.has_drafter:  # the engine is eager: in a CUDA graph no hook runs
            model = (runner.speculator if hasattr(runner, "speculator") else runner.drafter).model
            is_mtp = runner.speculative_config.method == "mtp"
            sizes = runner.speculative_config.draft_model_config.get_hidden_size(), runner.model_config.dtype
            self.lm_head = DrafterLmHead(model, *sizes) if is_mtp else None
            model.register_forward_hook(self.keep_with_drafter)
        if layers := [layer for layer in layers if layer != DRAFTER]:  # a compiled target would not return them
            runner.get_model().set_aux_hidden_state_layers(tuple(layers))
            runner.use_aux_hidden_state_outputs = True
        runner.execute_model = self.execute_model

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the runner and keep its rows."""
        if self.stream is not None:  # a CUDA graph would overwrite states that are still copied
            torch.cuda.current_stream().wait_stream(self.stream)
        output = self.execute(scheduler_output, *args, **kwargs)
        step = self.runner.execute_model_state  # None: nothing was scheduled, or not the last pipeline stage
        if step is not None and step.hidden_states is not None and not kwargs.get("dummy_run"):
            batch = getattr(step, "input_batch", None) or self.runner.input_batch  # of V2, of V1
            states = [*(step.aux_hidden_states or ()), step.hidden_states]
            if self.has_drafter:
                self.step = scheduler_output, list(batch.req_ids), states
            else:
                self.keep(scheduler_output, batch.req_ids, states)
        return output

    def keep_with_drafter(self, module: Any, args: Any, output: Any) -> None:
        """Keep the rows of a step after the first pass of its drafter, over the same rows."""
        if self.step is not None:
            states = output[0] if isinstance(output, tuple) else output
            states = states if self.lm_head is None else self.lm_head.normalised(states)
            (scheduled, req_ids, others), self.step = self.step, None
            self.keep(scheduled, req_ids, [states, *others])

    @torch.inference_mode()
    def keep(self, scheduler_output: Any, req_ids: Sequence[str], states: Sequence[Tensor]) -> None:
        """Copy the rows of a step; states: one or more [padded rows, D]."""
        self.steps += 1
        counts, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        host = self.to_host(torch.cat([part[: sum(counts.values())] for part in states], -1))
        for name, rows in zip(req_ids, host.split([counts[name] for name in req_ids]), strict=True):
            key = name.rpartition("-")[0]  # without vLLM's random suffix
            if computed[name] == 0:  # its first step, or it was preempted and starts again
                self.rows[key] = []
            if key in self.rows:  # else it has ended, and asynchronous scheduling did not know
                self.rows[key].append(rows)

    def to_host(self, states: Tensor) -> Tensor:
        if self.stream is None:
            return states  # `cat` made a copy
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            states.record_stream(self.stream)
            host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
            return host.copy_(states, non_blocking=True)

    def write(self, path: str, requests: Sequence[tuple[str, int]]) -> None:
        self.last_write.result()
        if path:
            parts = [(self.rows.pop(name), count) for name, count in requests]
            self.last_write = self.writer.submit(self._save, Path(path), parts)

    def _save(self, path: Path, parts: list[tuple[list[Tensor], int]]) -> None:
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            if self.stream is not None:
                self.stream.synchronize()
            found = [torch.cat(rows)[:count] for rows, count in parts]
        if any(len(rows) < count for rows, (_, count) in zip(found, parts, strict=True)):
            raise RuntimeError("a request has fewer rows than tokens: is prefix caching on?")
        with replacing(path) as (partial,):
            save_file({"states": torch.cat(found) if found else torch.zeros(0, 0)}, partial)
