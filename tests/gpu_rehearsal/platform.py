"""vLLM on its CUDA platform without CUDA: compiled operations and FlashAttention only check their arguments."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from tests.gpu_rehearsal.device import CUDA, PROPERTIES, Gpu, fake_empty, is_mixed
from tests.gpu_rehearsal.notes import NOTES

HALF = (torch.float16, torch.bfloat16)


class Operation:
    """An operation of vLLM's CUDA build that the CPU build lacks; it fills an argument."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    @property
    def default(self) -> Operation:
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_mixed(tree_leaves((args, kwargs))):
            NOTES.add("device", f"_C.{self.__name__} receives a tensor of the host")
        if self.__name__ == "weak_ref_tensor":
            return args[0]
        return False if "support" in self.__name__ else None


class NoPasses:
    """vLLM's own passes over a compiled graph, whose patterns are of compiled operations: none."""

    def __call__(self, graph: Any) -> None: ...

    def configure(self, config: Any) -> None: ...

    def add(self, one: Any) -> None: ...

    def uuid(self) -> str:
        return "none"


def _replace_operations() -> None:
    get = torch._ops._OpNamespace.__getattr__

    def get_operation(self: Any, name: str) -> Any:
        try:
            return get(self, name)
        except AttributeError:
            in_module = sys._getframe(1).f_code.co_name == "<module>"  # an import that asks whether it exists
            if name.startswith("__") or in_module or not self.name.startswith(("_C", "_moe_C")):
                raise
            return Operation(name)

    torch._ops._OpNamespace.__getattr__ = get_operation
    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        sys.modules[name] = types.ModuleType(name)
    passes = types.ModuleType("vllm.compilation.passes.pass_manager")  # imports patterns of compiled operations
    passes.PostGradPassManager = NoPasses
    sys.modules[passes.__name__] = passes


def _flash_attention(gpu: Gpu) -> types.ModuleType:
    def check(function: str, kwargs: dict[str, Any]) -> None:
        gpu.operations += 1
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                NOTES.add("device", f"{function}: {name} is a tensor of the host")

    def attend(*args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
        check("flash_attn_varlen_func", kwargs)
        if NOTES.phase == "in graph" and kwargs.get("num_splits") == 0:
            NOTES.add("graph", "FlashAttention chooses its splits on the host, by the lengths of the capture")
        query = kwargs.get("q", args[0] if args else None)
        if query.dtype not in HALF:
            NOTES.add("type", f"FlashAttention of {query.dtype}")
        return fake_empty(query) if out is None else out

    def schedule(*args: Any, **kwargs: Any) -> Tensor:
        check("get_scheduler_metadata", kwargs)
        return torch.empty(1 + 4 * kwargs.get("batch_size", 1), dtype=torch.int32, device=CUDA)

    module = types.ModuleType("vllm.vllm_flash_attn")
    vars(module).update(
        flash_attn_varlen_func=attend,
        compile_flash_attn_varlen_func_from_specs=attend,
        get_scheduler_metadata=schedule,
        is_fa_version_supported=lambda version, *_: version == 3,
        fa_version_unsupported_reason=lambda *_: None,
    )
    return module


def replace_platform(gpu: Gpu) -> None:
    """Make vLLM, which is imported here, choose its CUDA platform."""
    _replace_operations()
    flash = _flash_attention(gpu)
    sys.modules |= dict.fromkeys(("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"), flash)
    import vllm.platforms
    from triton.backends import backends
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    def constant(value: Any) -> Any:
        return classmethod(lambda cls, *_, **__: value)

    class Cuda(NonNvmlCudaPlatform):
        dist_backend = "gloo"
        get_device_capability = constant(DeviceCapability(9, 0))
        get_device_name = constant("NVIDIA H100 80GB HBM3")
        get_device_total_memory = constant(PROPERTIES.total_memory)
        device_count = constant(1)
        import_kernels = constant(None)
        num_compute_units = constant(PROPERTIES.multi_processor_count)
        is_fully_connected = constant(True)
        set_device = constant(None)

    vllm.platforms._current_platform = Cuda()
    import vllm.triton_utils
    import vllm.utils.torch_utils as torch_utils

    assert vllm.triton_utils.HAS_TRITON
    del backends["cpu"]
    register = torch_utils.direct_register_custom_op

    def register_operation(op_name: str, op_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        gpu.python_ops[op_name] = op_func
        return register(op_name, op_func, *args, **kwargs)

    torch_utils.direct_register_custom_op = register_operation
    torch_utils.get_accelerator_view_from_cpu_tensor = fake_empty


def replace_ranks(count: int) -> None:
    """Make this process rank 0 of `count` tensor-parallel ranks: collectives return at once, with any values."""
    import vllm.distributed.parallel_state as parallel_state
    import vllm.platforms
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    new_group = torch.distributed.new_group
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    torch.distributed.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")
    parallel_state.set_custom_all_reduce(False)
    parallel_state.in_the_same_node_as = lambda *_, **__: [True] * count
    MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    type(vllm.platforms.current_platform).device_count = classmethod(lambda cls: count)
