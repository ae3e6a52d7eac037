"""A GPU without memory: `torch.cuda` is replaced, CUDA tensors are FakeTensors, a dispatch mode checks operations."""

from __future__ import annotations

import contextlib
import ctypes
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch._dynamo
import torch._inductor.async_compile
import torch._inductor.utils  # before torch.cuda is replaced
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gpu_rehearsal.notes import NOTES

CUDA = torch.device("cuda:0")
MEMORY = 70 << 30, 80 << 30  # free, total
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=MEMORY[1], warp_size=32, uuid="0",
    is_integrated=False, L2_cache_size=50 << 20, shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536,
    shared_memory_per_multiprocessor=233472, max_threads_per_multi_processor=2048, gcnArchName="",
)  # fmt: skip
ATEN = torch.ops.aten
WAITS = {
    ATEN._local_scalar_dense.default, ATEN.is_nonzero.default, ATEN.nonzero.default, ATEN.masked_select.default,
    ATEN.equal.default, ATEN._unique2.default, ATEN.unique_consecutive.default, ATEN.repeat_interleave.Tensor,
    ATEN.bincount.default,
}  # fmt: skip
# Of floating point numbers, PyTorch compiles these at their first use (its "jiterator").
NVRTC = {
    "exp2", "i0", "special_i0e", "special_i1", "special_i1e", "sinc", "special_ndtri", "special_log_ndtr",
    "special_erfcx", "erfc", "erfinv", "lgamma", "digamma", "polygamma", "special_entr", "special_zeta", "prod",
}  # fmt: skip
FREE = ("empty", "new_empty", "detach", "prim", "device")  # operations that launch nothing
COPIES = (ATEN._to_copy.default, ATEN.copy_.default)

FAKE = FakeTensorMode(allow_non_fake_inputs=True)


class Stream:
    """A stream or event on which everything is done at once."""

    cuda_stream, device = 0, CUDA

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def synchronize(self) -> None:
        NOTES.add("wait", f"{type(self).__name__}.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class Event(Stream): ...


class Graph:
    """A CUDA graph that holds nothing; `alive`: those that are referenced."""

    alive: ClassVar[weakref.WeakSet[Graph]] = weakref.WeakSet()

    def __init__(self, *_: Any, **__: Any) -> None:
        self.alive.add(self)

    def replay(self) -> None: ...

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextlib.contextmanager
def _capturing(*_: Any, **__: Any) -> Iterator[None]:
    before, NOTES.phase = NOTES.phase, "in graph"
    try:
        yield
    finally:
        NOTES.phase = before


def _wait(name: str) -> Callable[..., None]:
    return lambda *_, **__: NOTES.add("wait", name)


def replace_torch_cuda() -> None:
    """Make torch report one H100."""
    stream, none = Stream(), lambda *_, **__: None
    memory = {
        "memory_stats": lambda *_: defaultdict(int),
        **dict.fromkeys(("memory_reserved", "memory_allocated", "max_memory_allocated"), lambda *_: 0),
        **dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), none),
    }
    cuda: dict[str, Any] = memory | {
        **dict.fromkeys(("is_available", "_is_compiled", "is_initialized"), lambda: True),
        **dict.fromkeys(("_lazy_init", "set_device", "set_stream", "manual_seed", "manual_seed_all"), none),
        "current_device": lambda: 0,
        "get_rng_state": lambda *_: None,
        "set_rng_state": none,
        "device_count": lambda: 1,
        "get_device_properties": lambda *_: PROPERTIES,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: PROPERTIES.name,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": _capturing,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: NOTES.phase == "in graph",
        **dict.fromkeys(("current_stream", "default_stream"), lambda *_: stream),
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": _wait("cuda.synchronize"),
        "mem_get_info": lambda *_: MEMORY,
    }
    accelerator: dict[str, Any] = memory | {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "set_device_index": none,
        "current_stream": lambda *_: stream,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "synchronize": _wait("accelerator.synchronize"),
        "get_memory_info": lambda *_: MEMORY,
    }
    for module, attributes in ((torch.cuda, cuda), (torch.accelerator, accelerator)):
        for name, value in attributes.items():
            if isinstance(value, types.FunctionType):  # Dynamo has a rule for each function, so each is an object
                value = types.FunctionType(value.__code__, value.__globals__, closure=value.__closure__)
            setattr(module, name, value)
    torch.version.cuda = "13.0"
    fake_tensor.init_gpu_context = lambda device: None
    # a build without CUDA has no guard of CUDA devices; that of meta tensors does nothing
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[14]
    nn.Module._apply = _apply
    torch.tensor = _tensor
    torch.Tensor.new_tensor = lambda self, data, dtype=None, device=None, **more: _tensor(
        data, dtype=dtype or self.dtype, device=device or self.device, **more
    )


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` for FakeTensors, which cannot be moved in place."""
    for child in self.children():
        child._apply(fn)
    for name, value in self._parameters.items():
        if value is not None:
            self._parameters[name] = nn.Parameter(fn(value.data), requires_grad=False)
    for name, value in self._buffers.items():
        if value is not None:
            self._buffers[name] = fn(value)
    return self


_PINNED: set[int] = set()
_torch_tensor = torch.tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensor(data: Any, *args: Any, pin_memory: bool = False, device: Any = None, **more: Any) -> Tensor:
    made = _torch_tensor(data, *args, device="cpu", **more)
    if device is None:  # of a `with torch.device(..)`
        modes = reversed(torch.overrides._get_current_function_mode_stack())
        device = next((mode.device for mode in modes if isinstance(mode, torch.utils._device.DeviceContext)), None)
    if pin_memory:
        _PINNED.add(_storage(made))
    if device is None or torch.device(device).type != "cuda":
        return made
    NOTES.add("pageable copy", "torch.tensor(.., device=cuda)")
    return made.to(device)


def is_mixed(tensors: list[Any]) -> bool:
    """Return whether a tensor that is no scalar lies on the host."""
    return any(isinstance(one, Tensor) and not isinstance(one, FakeTensor) and one.dim() for one in tensors)


def fake_empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    with FAKE:
        return torch.empty_strided(like.size(), like.stride(), dtype=dtype or like.dtype, device=CUDA)


class Gpu(TorchDispatchMode):
    """Runs operations of CUDA tensors on FakeTensors and the others as they are; notes what a GPU would not do.

    Attributes:
        python_ops: vLLM's own operations by name; they run as Python.
        operations: number of operations and launches.
        float64_bytes: of the largest tensor of float64.
    """

    def __init__(self, python_ops: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.python_ops, self.operations, self.float64_bytes = python_ops, 0, 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else Dynamo compiles nothing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        keeps = (ATEN.repeat_interleave.Tensor, ATEN.is_nonzero.default)
        if func.namespace == "aten" and func not in keeps and func._can_decompose():  # in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if func is ATEN.is_pinned.default:
            return not on_gpu and _storage(args[0]) in _PINNED
        if func in (ATEN.pin_memory.default, ATEN._pin_memory.default):
            return _pinned(args[0].clone())
        device, is_pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if not on_gpu and (device is None or torch.device(device).type != "cuda"):
            made = func(*args, **kwargs)
            return _pinned(made) if is_pinned and isinstance(made, Tensor) else made
        return self._on_gpu(func, args, kwargs, tensors)

    def _on_gpu(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if func.namespace == "vllm" and name in self.python_ops:
            with self:
                return self.python_ops[name](*args, **kwargs)
        if func.namespace.startswith(("_C", "_moe_C", "_vllm_fa")):
            if is_mixed(tensors):
                NOTES.add("device", f"{func.name()} receives a tensor of the host")
            return None
        if self._waits(func, name, args, kwargs):
            NOTES.add("wait", func.name())
            if func is ATEN._local_scalar_dense.default:
                return 1.0 if args[0].dtype.is_floating_point else 1
            if func in (ATEN.is_nonzero.default, ATEN.equal.default):
                return True
        if name in NVRTC and tensors and tensors[0].dtype.is_floating_point:
            NOTES.add("nvrtc", f"{name} {tensors[0].dtype}")
        if func in COPIES and (copied := self._copied(func, args, kwargs)) is not None:
            return copied
        return self._run(func, name, args, kwargs)

    @staticmethod
    def _waits(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        if func is ATEN.repeat_interleave.Tensor:
            return kwargs.get("output_size") is None
        is_index = name in ("index", "index_put_", "index_put", "_index_put_impl_")
        indices = tree_leaves(args[1]) if is_index else ()
        return func in WAITS or any(isinstance(one, Tensor) and one.dtype == torch.bool for one in indices)

    def _copied(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the result of a copy between host and device, or None for one on the device."""
        is_new, device = func is ATEN._to_copy.default, kwargs.get("device")
        source = args[0] if is_new else args[1]
        to_gpu = isinstance(args[0], FakeTensor)
        if is_new and device is not None:
            to_gpu = torch.device(device).type == "cuda"
        dtype = kwargs.get("dtype") or source.dtype
        if isinstance(source, FakeTensor) and not to_gpu:  # the host goes on with zeros
            if not kwargs.get("non_blocking", len(args) > 2 and args[2]):
                NOTES.add("wait", f"{func.name()} to the host")
            return torch.zeros(source.shape, dtype=dtype) if is_new else args[0].zero_()
        if isinstance(source, FakeTensor) or not to_gpu:
            return None
        if _storage(source) not in _PINNED and source.dim() and source.numel():
            NOTES.add("pageable copy", f"{func.name()} {list(source.shape)}")
        self.operations += 1
        return fake_empty(source, dtype) if is_new else args[0]

    def _run(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if not func.is_view and not name.startswith(FREE):
            self.operations += 1
        try:
            with FAKE:
                made = func(*args, **kwargs)
        except Exception as error:
            if "device" in str(error).lower():
                NOTES.add("device", f"{func.name()}: {str(error).splitlines()[0][:200]}")
            raise
        sizes = [one.nbytes for one in tree_leaves(made) if isinstance(one, Tensor) and one.dtype == torch.float64]
        self.float64_bytes = max([self.float64_bytes, *sizes])
        return made


def _pinned(tensor: Tensor) -> Tensor:
    _PINNED.add(_storage(tensor))
    return tensor
