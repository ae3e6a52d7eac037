"""Recorders that tests put into an engine's process: what is drafted and for which state, and graphs without a GPU.

tests/support/faults.py has the table that names them.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

Patches = dict[str, Callable[[Any], Any]]
RECORDED: list[Any] = []  # what recorders note during a call
TEXTS: list[list[int]] = []  # prompts with the answers of the engine that ran last, in the order of the requests

V1, V2 = "vllm_mtpc.proposers.v1", "vllm_mtpc.proposers.v2"
PROPOSER, SPECULATOR = f"{V1}.proposer.MtpcProposer", f"{V2}.speculator.MtpcSpeculator"
PROPOSE, PTP = f"{V2}.speculator.HeadSpeculator.propose", f"{V2}.ptp.ptp_speculator.PtpSpeculator"
VERIFICATION = f"{V2}.verification"
PTP_CAPTURED = f"{V2}.ptp.ptp_speculator.CAPTURED"  # attention backends whose second pass is captured
SAMPLING_PARAMS = "vllm.v1.worker.gpu.sample.sampler.Sampler.apply_sampling_params"
CACHE_BYTES = 1 << 26  # what is left for the KV cache after profiling


def wrapping(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function of an original that returns what takes its place: `replacement(original, ..)`."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return replaced

    return wrap


def request_number(name: str) -> int:
    """The index of a request among the prompts of an engine: offline, vLLM counts them from 0."""
    return int(name.partition("-")[0])


@wrapping
def drafts_v1(original: Any, *args: Any, **more: Any) -> list[list[int]]:
    """Record the drafts of every step of Model Runner V1."""
    drafts = original(*args, **more)
    RECORDED.append(drafts)
    return drafts


def noted_seeds(module: str) -> Callable[[Any], Any]:
    @wrapping
    def step_seeds(original: Any, seeds: Any, anchor: Any) -> Any:
        RECORDED.extend((module, *row) for row in zip(seeds.tolist(), anchor.tolist(), strict=True))
        return original(seeds, anchor)

    return step_seeds


@wrapping
def validated_drafts(original: Any, self: Any, request: Any, spec_tokens: list[int]) -> list[int]:
    """Record (drafts, the prefix that the grammar allows) for structured requests."""
    valid = original(self, request, spec_tokens)
    RECORDED.extend([(list(spec_tokens), list(valid))] * bool(request.use_structured_output))
    return valid


# Speculators of Model Runner V2


def after_propose(handle: Callable[..., Any]) -> Callable[[Any], Any]:
    """Call handle(self, row, request name, drafts, batch, num_sampled, num_rejected) for each row; record its result.

    A result of None is not recorded.
    """

    @wrapping
    def propose(original: Any, self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = original(self, input_batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            given = SimpleNamespace(batch=input_batch, sampled=args[4], rejected=args[5], **kwargs)
            notes = [handle(self, row, name, drafts, given) for row, name in enumerate(input_batch.req_ids)]
            RECORDED.extend(note for note in notes if note is not None)
        return drafts

    return propose


def state_and_drafts(self: Any, row: int, name: str, drafts: torch.Tensor, given: Any) -> dict[str, Any]:
    """Where the text ends, the state that the head reads there, and the drafts."""
    return {
        "request": request_number(name),
        "prefix": int(self.first_pos[row]) % resolve_name(f"{VERIFICATION}.DRAFTING"),
        "hidden": self.hidden_states[row].clone(),
        "drafts": drafts[row, : given.num_speculative_tokens].clone(),  # later columns are stale
    }


# PTP


def _index_of_first_draft(row: int, given: Any) -> int:
    """Number of tokens of a request before its first draft: its text and x_1."""
    last = int(given.batch.query_start_loc[row + 1] - given.rejected[row]) - 1
    return int(given.batch.positions[last]) + 2


def oracle() -> Patches:
    """Draft the text of the engine before, wrong from a random place on."""
    coin, texts = random.Random(7), list(TEXTS)

    def correct(self: Any, row: int, name: str, drafts: torch.Tensor, given: Any) -> None:
        if int(given.sampled[row]):
            first = _index_of_first_draft(row, given)
            right = texts[request_number(name)][first : first + drafts.shape[1]]
            keep = coin.randint(0, drafts.shape[1])
            text = [*right[:keep], *((token + 1) % 8 for token in right[keep:])]
            drafts[row, : len(text)] = torch.tensor(text, dtype=drafts.dtype)

    return {PROPOSE: after_propose(correct)}


@wrapping
def merged_groups(original: Any, self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Record the states of each request's group of auxiliary rows and the length of the text before it."""
    drafted, num_sampled = self.merged_output, args[4]
    if drafted is not None and not kwargs.get("dummy_run"):
        accepted = (num_sampled[: input_batch.num_reqs].long() - 1).clamp(min=0)
        start, size = drafted.layout.find_group(accepted)
        for row, name in enumerate(input_batch.req_ids):
            if int(num_sampled[row]) and int(size[row]):
                first = row * drafted.layout.rows + int(start[row])
                hidden = drafted.hidden[first : first + int(size[row])].clone()
                prefix = int(drafted.position[row] + 1 + accepted[row])
                RECORDED.append({"request": name, "prefix": prefix, "hidden": hidden})
    return original(self, input_batch, *args, **kwargs)


def groups() -> Patches:
    """Record the groups of merged passes, and the same of the second of two passes."""
    names: list[str] = []  # by row; "": nothing was sampled

    @wrapping
    def generate(original: Any, self: Any, input_batch: Any, num_sampled: torch.Tensor, drafts: torch.Tensor) -> None:
        names[:] = [name if count else "" for name, count in zip(input_batch.req_ids, num_sampled, strict=False)]
        original(self, input_batch, num_sampled, drafts)

    @wrapping
    def run(original: Any, self: Any, num_reqs: int, num_aux: int) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, logits = original(self, num_reqs, num_aux)
        for row, name in enumerate(names):
            if name:  # x_1 is the group's first row
                prefix = int(self.first_pos[row]) + 1
                RECORDED.append({"request": name, "prefix": prefix, "hidden": hidden[row, 1:].clone()})
        return hidden, logits

    return {PROPOSE: merged_groups, f"{PTP}._generate_draft": generate, f"{PTP}._run_draft_pass": run}


# KV caches


def poisoned(early: int = 0) -> Patches:
    """Fill blocks with NaN when they are handed out and, without prefix caching, when they are freed; record how many
    are in use. `early`: free windows as if so many more tokens had been computed.
    """
    caches: list[torch.Tensor] = []

    def poison(blocks: list[Any]) -> None:
        for cache in caches:
            cache[[block.block_id for block in blocks]] = torch.nan

    @wrapping
    def new(original: Any, self: Any, *args: Any, **kwargs: Any) -> list[Any]:
        blocks = original(self, *args, **kwargs)
        poison(blocks)
        RECORDED.append(self.num_gpu_blocks - 1 - self.get_num_free_blocks())  # block 0 belongs to no request
        return blocks

    @wrapping
    def free(original: Any, self: Any, blocks: Any, *args: Any, **kwargs: Any) -> None:
        blocks = list(blocks)
        original(self, blocks, *args, **kwargs)
        if not self.enable_caching:
            poison([block for block in blocks if block.ref_cnt == 0 and not block.is_null])

    @wrapping
    def bind(original: Any, self: Any, kv_cache: Any) -> None:
        original(self, kv_cache)
        caches.append(kv_cache)

    @wrapping
    def skipped(original: Any, self: Any, num_computed_tokens: int) -> int:
        return original(self, num_computed_tokens + early)

    pool = "vllm.v1.core.block_pool.BlockPool"
    return {
        f"{pool}.get_new_blocks": new,
        f"{pool}.free_blocks": free,
        "vllm_mtpc.models.paged_cache.PagedCache.bind_kv_cache": bind,
        "vllm_mtpc.models.evabyte.vllm_model.WindowManager.get_num_skipped_tokens": skipped,
    }


# CUDA graphs and memory, as on a GPU


@wrapping
def checked_dtypes(original: Any, *args: Any, **named: Any) -> torch.Tensor:
    """Check the dtypes that vLLM's sampling kernels load: an interpreter takes others, Triton on a GPU refuses them."""
    given = inspect.signature(original).bind(*args, **named).arguments
    found = {name: value.dtype for name, value in given.items() if isinstance(value, torch.Tensor)}
    assert found["expanded_idx_mapping"] in (torch.int32, torch.int64) and found["pos"] == torch.int64, found
    assert found["input_ids"] == found["expanded_local_pos"] == torch.int32, found
    return original(*args, **named)


def in_graphs(owner: str, mode: str, record: Callable[[Any], Any] | None = None) -> Patches:
    """Draft from graphs, which a stand-in for CUDA's calls again; batches are padded to 2 and 4.

    Record the number of replays of each step. Without `record`, another recorder of `propose`, draft each step a second
    time without graphs, and record whether the drafts are equal.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    from tests.support.speculators import Recorder

    recorder = Recorder()

    @wrapping
    def init(original: Any, self: Any, _: Any) -> None:
        _set_graph_sizes(self)
        self.attn_cg_support = mock.Mock(min_cg_support=AttentionCGSupport.UNIFORM_BATCH)
        with recorder.in_place():
            original(self, CUDAGraphMode[mode])

    @wrapping
    def propose(original: Any, self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        original = original if record is None else record(original)
        if kwargs.get("dummy_run"):
            return original(self, *args, **kwargs)
        with recorder.in_place():
            if not recorder.captured:
                kept = self.block_tables.slot_mappings.clone()  # of the current step
                self.capture()
                self.block_tables.slot_mappings.copy_(kept)
            before = len(recorder.replayed)
            drafts = original(self, *args, **kwargs).clone()
            note = {"replayed": len(recorder.replayed) - before}
            if record is None:
                with mock.patch.object(self.graphs, "find", lambda *batch: None):
                    note["same"] = torch.equal(drafts, original(self, *args, **kwargs))
        RECORDED.append(note)
        return drafts

    @wrapping
    def run(original: Any, self: Any, num_reqs: int, num_aux: int) -> Any:
        """Attention on a CPU plans on the host, where a graph has what it captured."""
        self._build_pass_metadata(num_aux, torch.full((num_reqs,), self.max_model_len, dtype=torch.int32))
        return original(self, num_reqs, num_aux)

    patches = {f"{owner}.init_cudagraph_manager": init, PROPOSE: propose}
    on_ptp = {PTP_CAPTURED: lambda _: ("CPU_ATTN",), f"{owner}._run_draft_pass": run, SAMPLING_PARAMS: checked_dtypes}
    return patches | (on_ptp if owner == PTP else {})


def profiled_as_on_a_gpu() -> Patches:
    """Run vLLM's profile of a forward pass; on V2 capture the drafts' graphs in vLLM's minimal KV cache.

    Record the blocks of that cache and the number of graphs.
    """
    from vllm.config import set_current_vllm_config
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu import cudagraph_utils

    from tests.support.speculators import Recorder

    recorder = Recorder()

    def capture(runner: Any) -> None:
        speculator, spec = runner.speculator, runner.vllm_config.speculative_config
        _set_graph_sizes(speculator)
        cudagraph_utils._init_minimal_kv_cache_for_profiling(runner)
        blocks = runner.kv_cache_config.num_blocks
        speculator.attn_cg_support = mock.Mock(min_cg_support=AttentionCGSupport.UNIFORM_BATCH)
        has_graphs = getattr(spec, "draft_pass", "two-pass") == "two-pass"
        speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY if has_graphs else CUDAGraphMode.NONE)
        speculator.capture()
        speculator.graphs = None
        cudagraph_utils._teardown_profiling_state(runner)
        RECORDED.append((blocks, len(recorder.captured)))

    def determine_available_memory(self: Any) -> int:
        with set_current_vllm_config(self.vllm_config), recorder.in_place():
            self.model_runner.profile_run()
            if self.vllm_config.use_v2_model_runner and self.model_runner.speculator is not None:
                capture(self.model_runner)
        return CACHE_BYTES

    return {
        "vllm.v1.worker.cpu_worker.CPUWorker.determine_available_memory": lambda _: determine_available_memory,
        "torch.accelerator.synchronize": lambda _: lambda: None,
        "torch.accelerator.empty_cache": lambda _: lambda: None,
        PTP_CAPTURED: lambda _: ("CPU_ATTN",),
    }


def _set_graph_sizes(speculator: Any) -> None:
    """Capture batches of 2 and 4; the buffers that a speculator makes for an engine's graphs get room for them."""
    compilation = speculator.vllm_config.compilation_config
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [2, 4], 4
    rows = 4 * (1 + speculator.num_speculative_steps)
    for name in {"first_logits", "aux"} & {*vars(speculator)}:
        setattr(speculator, name, getattr(speculator, name).new_zeros(rows, getattr(speculator, name).shape[1]))
