"""Modules and weights in a worker: shared with the target, copies of compiled ones, and what a sleep loses.

vLLM's sleep of level 2 saves the buffers of the speculator's model only. Here every tensor that loading a speculator
allocated is zeroed, then those buffers are copied back as `Worker.wake_up` does.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.support import forks
from tests.support.configs import engine_config
from vllm_mtpc import demo
from vllm_mtpc.checkpoint import load_head, save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head, linear
from vllm_mtpc.proposers.worker import load
from vllm_mtpc.proposers.worker.load import load_served_head

V, D = 7, 8
CPU = torch.device("cpu")
CUDA = {f"is_{name}": lambda: False for name in ("rocm", "cpu", "tpu", "xpu", "out_of_tree")}
FIRST = torch.tensor([6, 0, 3])
HEADS: dict[str, dict[str, Any]] = {
    "head": {"method": "mtpc"},
    "shared": {"method": "mtpc"},
    "layered": {"method": "mtpc"},
    "o-ptp": {"method": "ptp", "draft_pass": "two-pass"},
    "late": {"method": "ptp", "draft_pass": "merged"},
}


@contextmanager
def worker_target(config: Any) -> Iterator[nn.Module]:
    """In a fork: vLLM's model of this configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    with set_current_vllm_config(config):
        init_worker_distributed_environment(config, 0, "tcp://127.0.0.1:0", 0, "gloo")
        yield initialize_model(config)


class FakeTarget(nn.Module):
    """vLLM's `compute_logits`: two-dimensional states of the model's dtype; here with padding left in."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(D, V, bias=False, dtype=dtype)
        self.seen: list[torch.Tensor] = []

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        self.seen.append(states)
        return nn.functional.pad(self.lm_head(states), (0, 5), value=1e4)  # would win every draft


def save(folder: Path, head: str) -> Path:
    target = {"hidden_size": D, "vocab_size": V}
    config = HeadConfig.create(circuit="cp", window=4, num_components=2, target=target, verifier="x", head=head)
    torch.manual_seed(1)
    save_head(folder, config, build_head(config), {}, "card", torch.float32)
    return folder


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_needs_one_reads_the_targets_lm_head(tmp_path: Path, target_dtype, head_dtype) -> None:
    target = FakeTarget(target_dtype)
    head = load_served_head(str(save(tmp_path, "shared")), head_dtype, CPU, target, target_dtype, "auto", 3)
    hidden = torch.randn(3, D).to(head_dtype)
    leaf = head(hidden, 3).leaf
    assert leaf.shape == (3, 3, 2, V) and leaf.dtype == torch.float32
    assert [(tuple(states.shape), states.dtype) for states in target.seen] == [((3 * 3 * 2, D), target_dtype)]
    _, same = load_head(tmp_path, head_dtype)
    same.bind_lm_head(lambda states: target.lm_head(states.to(target_dtype)))
    assert torch.equal(leaf, same(hidden, 3).leaf)
    assert not any(name.startswith("lm_head") for name, _ in head.named_parameters())


def served(folder: Path, dtype: torch.dtype, head_dtype: str = "auto") -> nn.Module:
    return load_served_head(str(folder), dtype, CPU, FakeTarget(torch.float32), torch.float32, head_dtype, 2)


@pytest.mark.parametrize("head_dtype", ["auto", "float32", "bfloat16", "float16"])
def test_the_head_has_the_dtype_that_is_asked_for(tmp_path: Path, head_dtype: str) -> None:
    head, hidden = served(save(tmp_path, "linear"), torch.bfloat16, head_dtype=head_dtype), torch.randn(3, D)
    wanted = torch.bfloat16 if head_dtype == "auto" else getattr(torch, head_dtype)
    assert head.hidden_dtype == wanted
    params = head.draft_params(hidden, FIRST, 2)
    assert params.leaf.dtype == wanted
    _, plain = load_head(tmp_path, wanted)
    same = plain.draft_params(hidden, FIRST, 2)
    # the same products, of weights laid out in another way: one rounding of logits below 0.1
    torch.testing.assert_close(params.leaf, same.leaf, rtol=0, atol=1e-3)
    torch.testing.assert_close(params.evidence, same.evidence, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank, rows", [(0, 2), (2, 2), (3, 1)])
def test_large_unembeddings_are_divided_over_ranks(tmp_path: Path, monkeypatch, dtype, rank: int, rows: int) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(load, "_num_ranks", lambda: 4)
    monkeypatch.setattr(load, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(load, "_gather", lambda own: seen.append(own) or torch.cat([own] * 4))
    folder, bytes_needed = save(tmp_path, "linear"), 4 * 2 * V * D * dtype.itemsize
    monkeypatch.setitem(linear.SHARD_BYTES, "cpu", bytes_needed)
    head = served(folder, dtype)
    params = head.draft_params(torch.randn(3, D), FIRST, 2)
    own = 2 * 2 * 4 // dtype.itemsize + 2 * 2 * 2  # two float32 numbers per component, then K r rows of logits
    assert [tuple(part.shape) for part in seen] == [(3, own)], "one gather of equal sizes"
    assert params.leaf.shape == (3, 2, 2, V) and params.evidence.shape == (3, 2)
    logits = seen[0][:, 2 * 2 * 4 // dtype.itemsize :].view(3, 2, 2, 2)
    assert (logits[..., rows:] == 0).all() and (logits[..., :rows] != 0).all(), "rows of this rank, filled up"
    monkeypatch.setitem(linear.SHARD_BYTES, "cpu", bytes_needed + 1)
    served(folder, dtype).draft_params(torch.randn(3, D), FIRST, 2)
    assert len(seen) == 1, "small ones are replicated"


def methods(made: Path) -> dict[str, Any]:
    """In a fork: the methods that CustomOps of the target and of a student for CUDA run, by class; priorities."""
    from vllm.model_executor import custom_op

    with mock.patch.dict(sys.modules, {"vllm._C_stable_libtorch": ModuleType("of a build for CUDA")}):
        from vllm.platforms.cuda import CudaPlatformBase

    from vllm_mtpc.checkpoint.ptp_head import load_ptp
    from vllm_mtpc.proposers.v2 import speculator
    from vllm_mtpc.proposers.v2.lora import Gate
    from vllm_mtpc.proposers.v2.ptp.groups import Writes, build_student

    compiled = {"mode": 3, "backend": "inductor", "custom_ops": ["none"]}
    config = engine_config(made / "target", None, compilation_config=compiled)
    with worker_target(config) as target:
        lora = load_ptp(made / "o-ptp", torch.float32, CPU).lora
        with mock.patch.object(custom_op, "current_platform", SimpleNamespace(**CUDA)):
            student = build_student(target, lora, 1.0, Gate(), Writes())
    found = {"target": _methods(target), "student": _methods(student)}
    pairs = zip(_ops(target.model), _ops(student.model), strict=True)
    found["shared"] = all(ours._parameters is theirs._parameters for theirs, ours in pairs)
    found["own"] = all(ours._forward_method.__self__ is ours for ours in _ops(student.model))
    priority = config.kernel_config.ir_op_priority
    priority.rms_norm, priority.fused_add_rms_norm = ["mine", "native"], ["native"]
    with mock.patch.object(speculator, "current_platform", CudaPlatformBase):
        found["priorities"] = vars(speculator.eager_priorities(config))
    found["mode"] = config.compilation_config.mode.name
    return found


def _ops(module: torch.nn.Module) -> list[Any]:
    from vllm.model_executor.custom_op import CustomOp

    kinds = ("RMSNorm", "SiluAndMul", "Llama3RotaryEmbedding", "RotaryEmbedding")
    # layers of the target share one rotary embedding
    every = [part for _, part in module.named_modules(remove_duplicate=False)]
    return [part for part in every if isinstance(part, CustomOp) and type(part).__name__ in kinds]


def _methods(module: torch.nn.Module) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for part in _ops(module):
        found.setdefault(type(part).__name__, set()).add(part._forward_method.__name__)
    return found


def test_copies_of_compiled_modules_run_kernels(made: Path) -> None:
    found = forks.call("v2", "tests.proposers.test_load:methods", made)
    for whose, method in (("target", "forward_native"), ("student", "forward_cuda")):
        assert found[whose] == {kind: {method} for kind in ("RMSNorm", "SiluAndMul", "RotaryEmbedding")}, whose
    assert found["shared"] and found["own"]
    assert found["mode"] != "NONE"  # the target's own config is left as it is
    assert found["priorities"]["rms_norm"] == ["mine", "vllm_c", "native"]
    assert found["priorities"]["fused_add_rms_norm"] == ["vllm_c", "native"]


def lost(place: Path, name: str) -> tuple[int, list[int]]:
    """In a fork: the number of storages that loading the head allocated, and sizes of those that a sleep changes."""
    from vllm_mtpc.proposers.v2.model_runner_v2 import speculator_class

    config = engine_config(place / "target", {"model": str(place / name), **HEADS[name]}, enforce_eager=True)
    with worker_target(config) as target:
        made = speculator_class(config.speculative_config)(config, CPU)
        target.compute_logits = lambda states: states.new_zeros(len(states), V)  # its lm_head is not laid out
        before = _tensors()
        made.load_model(target)
    left = {key: part for key, part in _tensors().items() if key not in before}
    saved = {name: part.clone() for name, part in made.model.named_buffers()}
    were = {key: part.clone() for key, part in left.items()}
    for part in left.values():
        part.zero_()
    for name, part in made.model.named_buffers():
        part.data.copy_(saved[name])
    return len(left), [part.numel() for key, part in left.items() if not torch.equal(part, were[key])]


def _tensors() -> dict[int, Tensor]:
    """The bytes of every storage that a tensor has."""
    gc.collect()
    parts = [part for part in gc.get_objects() if isinstance(part, Tensor) and part.device == CPU and part.numel()]
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in parts}
    return {key: torch.empty(0, dtype=torch.uint8).set_(storage) for key, storage in storages.items()}


@pytest.mark.parametrize("name", HEADS)
def test_head_is_kept_after_sleep(made: Path, name: str) -> None:
    count, changed = forks.call("v2", "tests.proposers.test_load:lost", made, name)
    assert count > 3 and changed == []


@pytest.mark.parametrize("is_fault", [False, True])
def test_an_engine_forked_after_the_head_was_checked_can_compute(is_fault: bool) -> None:
    """On a GPU vLLM forks its engine, and OpenMP's threads do not survive a fork."""
    ended = forks.call("v1", "tests.proposers.test_load:_fork_with_head", is_fault)
    assert ended == (-signal.SIGALRM if is_fault else 0)


def _fork_with_head(is_fault: bool) -> int:
    """Return the exit code of a fork that converts a tensor with two threads, as the engine that loads weights."""
    torch.set_num_threads(2)
    if is_fault:  # a check by PyTorch
        torch.ones(1 << 22).isfinite()
    engine_config(demo.path("target"), {"method": "mtpc", "model": str(demo.path("btree"))})
    if (child := os.fork()) == 0:
        signal.alarm(5)
        torch.ones(1 << 22, dtype=torch.bfloat16).float()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Drafter(nn.Module):
    """The model of an MTP layer that normalises its states in `compute_logits`, or in its forward pass."""

    def __init__(self, is_in_logits: bool) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        class Processor(LogitsProcessor):
            __init__ = nn.Module.__init__

            def forward(self, lm_head: nn.Module, states: Tensor) -> Tensor:
                return lm_head(states)

        super().__init__()
        self.norm = nn.RMSNorm(D) if is_in_logits else nn.Identity()
        self.lm_head, self.processor = nn.Linear(D, V), Processor()

    def compute_logits(self, states: Tensor) -> Tensor:
        return self.processor(self.lm_head, self.norm(states))


@pytest.mark.parametrize("is_in_logits", [True, False])
def test_hosted_states_are_those_that_the_lm_head_multiplies(is_in_logits: bool) -> None:
    forks.call("v1", f"{__name__}:keep_states", is_in_logits)


def keep_states(is_in_logits: bool) -> None:
    """In a fork: vLLM's speculator of MTP layers with a model of ours."""
    from vllm_mtpc.proposers.v2.hosted import MTPSpeculator, hosted_class

    class Host(hosted_class("mtp")):
        def __init__(self) -> None:
            self.method, self.dtype, self.model = "mtp", torch.float32, Drafter(is_in_logits)
            self.kept, self.draft_tokens = torch.zeros(3, 1, D), torch.zeros(3, 1, dtype=torch.int64)

    with mock.patch.object(MTPSpeculator, "load_model"), torch.inference_mode():
        host, states = Host(), torch.randn(2, D) * 3
        host.load_model(None)
        host.sample_draft(states)
        assert torch.equal(host.kept[:2, 0], host.model.norm(states))
        assert torch.equal(host.lm_head.compute_logits(host.kept[:2, 0]), host.model.compute_logits(states))
