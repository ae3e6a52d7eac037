"""Ops that the target compiles run as kernels in the uncompiled copies of its modules."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import forks
from tests.support.configs import engine_config
from tests.support.models import make_ptp_head, make_target
from tests.support.speculators import CPU

CUDA = {f"is_{name}": lambda: False for name in ("rocm", "cpu", "tpu", "xpu", "out_of_tree")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eager")
    make_ptp_head(folder / "head", make_target(folder / "target", vocab_size=32, seed=0), "o-ptp", 4)
    return folder


def methods(place: Path) -> dict[str, Any]:
    """In a fork: the methods that CustomOps of the target and of a student for CUDA run, by class; priorities."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor import custom_op
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    with mock.patch.dict(sys.modules, {"vllm._C_stable_libtorch": ModuleType("of a build for CUDA")}):
        from vllm.platforms.cuda import CudaPlatformBase

    from vllm_mtpc.checkpoint.ptp_head import load_ptp
    from vllm_mtpc.proposers.v2 import shared_modules
    from vllm_mtpc.proposers.v2.lora import Gate
    from vllm_mtpc.proposers.v2.ptp.tree import Writes, build_student

    compiled = {"mode": 3, "backend": "inductor", "custom_ops": ["none"]}
    config = engine_config(place / "target", None, compilation_config=compiled)
    with set_current_vllm_config(config):
        init_worker_distributed_environment(config, 0, "tcp://127.0.0.1:0", 0, "gloo")
        target = initialize_model(config)
        lora = load_ptp(place / "head", torch.float32, CPU).lora
        with mock.patch.object(custom_op, "current_platform", SimpleNamespace(**CUDA)):
            student = build_student(target, lora, 1.0, Gate(), Writes())
    found = {"target": _methods(target), "student": _methods(student)}
    pairs = zip(_ops(target.model), _ops(student.model), strict=True)
    found["shared"] = all(ours._parameters is theirs._parameters for theirs, ours in pairs)
    found["own"] = all(ours._forward_method.__self__ is ours for ours in _ops(student.model))
    priority = config.kernel_config.ir_op_priority
    priority.rms_norm, priority.fused_add_rms_norm = ["mine", "native"], ["native"]
    with mock.patch.object(shared_modules, "current_platform", CudaPlatformBase):
        found["priorities"] = vars(shared_modules.eager_priorities(config))
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


def test_copies_of_compiled_modules_run_kernels(place: Path) -> None:
    found = forks.call("v2", "tests.proposers.test_eager:methods", place)
    for whose, method in (("target", "forward_native"), ("student", "forward_cuda")):
        assert found[whose] == {kind: {method} for kind in ("RMSNorm", "SiluAndMul", "RotaryEmbedding")}, whose
    assert found["shared"] and found["own"]
    assert found["mode"] != "NONE"  # the target's own config is left as it is
    assert found["priorities"]["rms_norm"] == ["mine", "vllm_c", "native"]
    assert found["priorities"]["fused_add_rms_norm"] == ["vllm_c", "native"]
