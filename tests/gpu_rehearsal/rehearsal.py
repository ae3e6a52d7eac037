"""The phases of a GPU engine: what vLLM's worker does, on the replaced torch.cuda, Triton and platform."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.gpu_rehearsal import faults
from tests.gpu_rehearsal.device import CUDA, Gpu, Graph, replace_torch_cuda
from tests.gpu_rehearsal.launches import Launches
from tests.gpu_rehearsal.notes import NOTES
from tests.gpu_rehearsal.platform import replace_platform, replace_ranks

KV_BYTES = 1 << 28
IMPORTED = ("vllm.engine.arg_utils", "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu.warmup", "vllm_mtpc.plugin")
BATCHES = (1, 2, 3, 16, 17)  # each of them and max_num_seqs is decoded in several steps
ENGINE: dict[str, Any] = {
    "max_model_len": 240,
    "max_num_batched_tokens": 1024,
    "load_format": "dummy",
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
    "kv_cache_memory_bytes": KV_BYTES,
    "enable_prefix_caching": False,
    "seed": 0,
}


@dataclass
class Report:
    """The result of a rehearsal.

    Attributes:
        findings: as `Finding`, with `matters` and `count`.
        drafts: of each call of `propose` outside of CUDA graphs `num_reqs`, `has_prompt` (more rows than verification
            of K drafts has) and `operations` on the GPU.
        float64_bytes: of the largest tensor of float64 of graphs and steps.
        error: None, or why it ended early.
    """

    head: str
    findings: list[dict[str, Any]] = field(default_factory=list)
    drafts: list[dict[str, Any]] = field(default_factory=list)
    float64_bytes: int = 0
    error: str | None = None

    @property
    def serious(self) -> list[dict[str, Any]]:
        """The findings of this package that a user of a GPU would notice."""
        return [found for found in self.findings if found["ours"] and found["matters"]]

    @property
    def most_operations(self) -> int:
        """The most GPU operations of a draft outside of graphs, in steps without prompts."""
        return max((draft["operations"] for draft in self.drafts if not draft["has_prompt"]), default=0)


class Rehearsal:
    """One engine; the modules that `replace_modules` replaced hold its GPU, so a process can rehearse once."""

    def __init__(self, gpu: Gpu, launches: Launches, head: str) -> None:
        self.reports, self.gpu, self.launches = [Report(head)], gpu, launches

    @property
    def report(self) -> Report:
        return self.reports[-1]

    @classmethod
    def replace_modules(cls) -> Callable[[str], Rehearsal]:
        """Replace torch.cuda, Triton's launches and vLLM's platform; return the function that makes a rehearsal."""
        gpu = Gpu({})
        launches = Launches(gpu)
        replace_torch_cuda()
        launches.replace_triton()
        replace_platform(gpu)
        for module in IMPORTED:  # once for all rehearsals, which are forks
            import_module(module)
        return partial(cls, gpu, launches)

    def run(self, engine: dict[str, Any], spec: dict[str, Any], has_faults: bool) -> list[Report]:
        """Return the report and, with faults, that of the same steps with the faults of faults.py."""
        try:
            self._run(engine, spec, has_faults)
        except Exception as error:
            self.report.error = f"{type(error).__name__}: {error}"[:2000]
            traceback.print_exc()
        self._end_report()
        return self.reports

    def _end_report(self) -> None:
        found = NOTES.found.items()
        self.report.findings = [asdict(one) | {"matters": one.matters, "count": count} for one, count in found]
        NOTES.found.clear()

    def _phase(self, name: str) -> None:
        NOTES.phase = name
        print(f"{name} ({len(self.launches.compiled)} Triton variants)", file=sys.stderr, flush=True)

    def _run(self, engine: dict[str, Any], spec: dict[str, Any], has_faults: bool) -> None:
        self._phase("config")
        ranks = engine.get("tensor_parallel_size", 1)
        if ranks > 1:
            replace_ranks(ranks)
        config = self._config(engine, spec)
        from vllm.config import set_current_vllm_config
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
        from vllm.v1.worker.workspace import init_workspace_manager

        with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder, self.gpu:
            init_distributed_environment(ranks, 0, f"file://{folder}/store", 0, backend="gloo")
            ensure_model_parallel_initialized(ranks, 1)
            init_workspace_manager(CUDA, 1, 1)
            runner = self._load(config)
            self._prepare(runner, config)
            self._decode(runner, config)
            if has_faults:
                self._end_report()
                self.reports.append(Report(f"{self.report.head}-faults"))
                faults.inject(runner.speculator)
                self._decode(runner, config)

    def _config(self, engine: dict[str, Any], spec: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.plugins import load_general_plugins

        from benchmarks.demo import demo_heads

        given = {"model": str(demo_heads.path("target"))} | ENGINE | engine
        if self.report.head != "plain":
            head = self.report.head
            folder = Path(head) if "/" in head else demo_heads.path(head)
            method = json.loads((folder / "config.json").read_text())["speculators_model_type"]
            given["speculative_config"] = {"method": method, "model": str(folder)} | spec
        load_general_plugins()
        return EngineArgs(**given).create_engine_config()

    def _load(self, config: Any) -> Any:
        """Make the runner and load a model without values: its parameters are FakeTensors."""
        import vllm.model_executor.model_loader.dummy_loader as dummy
        import vllm.model_executor.model_loader.reload.layerwise as layerwise
        from vllm.model_executor.models.utils import AutoWeightsLoader
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        self._phase("load")
        dummy.initialize_single_dummy_weight = lambda *_, **__: None
        layerwise.capture_layer_to_meta = lambda layer: ({}, {})
        AutoWeightsLoader.load_weights = lambda *_, **__: set()
        if config.speculative_config is not None:
            from vllm_mtpc.proposers.patches.patch import apply
            from vllm_mtpc.proposers.patches.vllm_patches import init_speculator
            from vllm_mtpc.proposers.v2.model_runner_v2 import HeadModelRunner
            from vllm_mtpc.proposers.worker.derive import derived

            apply(init_speculator)
        runner = GPUModelRunner(config, CUDA)
        if config.speculative_config is not None:
            runner.__class__ = derived(HeadModelRunner, runner.__class__)
            runner.begin()
        runner.load_model()
        for module in {*runner.model.modules(), *config.compilation_config.static_forward_context.values()}:
            _place_tensors(module)
        if runner.speculator is not None:
            rows = 1 + runner.speculator.num_speculative_steps
            runner.speculator.propose = self._counted(runner.speculator.propose, rows)
        return runner

    def _prepare(self, runner: Any, config: Any) -> None:
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
        from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels
        from vllm.v1.worker.gpu_worker import Worker

        self._phase("profile")
        runner.profile_run()
        self._phase("graph memory")
        worker = types.SimpleNamespace(vllm_config=config, model_runner=runner)
        layouts = Worker.get_supported_kv_cache_layouts(worker)
        resolve_kv_cache_layout(config, [layouts], runner.get_kv_cache_spec().values())
        runner.profile_cudagraph_memory()
        gc.collect()
        if Graph.alive:
            NOTES.add("graph", f"{len(Graph.alive)} graphs of vLLM's memory profile are still held", ours=True)
        self._phase("kv cache")
        (kv_config,) = get_kv_cache_configs(config, [runner.get_kv_cache_spec()], [KV_BYTES])
        config.cache_config.num_gpu_blocks = kv_config.num_blocks
        if config.speculative_config is not None:
            config.speculative_config.reserved_blocks(config, kv_config)
        runner.initialize_kv_cache(kv_config)
        self._phase("warm-up")
        step = runner, runner.execute_model, runner.sample_tokens
        for size in (config.scheduler_config.max_num_batched_tokens, 1):
            runner._dummy_run(size)
        run_mixed_prefill_decode_warmup(*step, 16)
        warmup_kernels(*step)
        self._phase("capture")
        self.gpu.float64_bytes = 0
        runner.capture_model()

    def _decode(self, runner: Any, config: Any) -> None:
        """Serve batches of the requests that vLLM's own warm-up makes: all sampling options, prompts and steps."""
        from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels

        self._phase("step")
        step = runner, runner.execute_model, runner.sample_tokens
        run_mixed_prefill_decode_warmup(*step, 16, req_id_prefix=f"again-{len(self.reports)}")
        most = config.scheduler_config.max_num_seqs
        for count in sorted({*BATCHES, most}, reverse=True):
            if count <= most:
                config.scheduler_config.max_num_seqs = count
                warmup_kernels(*step)
        config.scheduler_config.max_num_seqs = most
        for num_drafts, at_once in getattr(runner.speculator, "rows_at_once", {}).items():
            for count in {1, 2, 16, 17} & {*range(min(most, at_once) + 1)}:
                self._draft(runner.speculator, count, num_drafts)
        self.report.float64_bytes = self.gpu.float64_bytes
        self._phase("done")

    def _draft(self, made: Any, count: int, num_drafts: int) -> None:
        """Draft for a batch of this size, and again with masks where grammars mask drafts.

        Not for a single draft: its first one under a grammar compiles `choose` for a stride of 1.
        """
        index = torch.arange(count, device=CUDA)
        masks = index.new_zeros((count, num_drafts, -(-made.model.vocab_size // 32)), dtype=torch.int32)
        is_masked = made.structured is not None and num_drafts > 1
        for rows, bits in ((slice(count), None), (index, masks))[: 1 + is_masked]:
            written = made.draft_tokens[rows, :num_drafts], made.draft_token_confidence_probs[rows, :num_drafts]
            made._sample(*made._draft_params(rows, num_drafts), rows, *written, bits)

    def _counted(self, propose: Callable[..., Any], rows: int) -> Callable[..., Any]:
        def counted(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            before, num_reqs = self.gpu.operations, input_batch.num_reqs
            drafts = propose(input_batch, *args, **kwargs)
            if NOTES.phase == "step":
                draft = {"num_reqs": num_reqs, "has_prompt": input_batch.num_tokens > rows * num_reqs}
                self.report.drafts.append(draft | {"operations": self.gpu.operations - before})
            return drafts

        return counted


def _place_tensors(module: nn.Module) -> None:
    """Give a device to the tensors that loading without values left on "meta"."""
    for name, value in [*module._buffers.items(), *vars(module).items()]:
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            setattr(module, name, torch.empty(value.shape, dtype=value.dtype, device=CUDA))
