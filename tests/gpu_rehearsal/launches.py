"""Triton without a GPU: every launch is bound as for an H100, and every new variant is compiled for sm_90."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, compute_cache_key

from tests.gpu_rehearsal.device import CUDA, Gpu
from tests.gpu_rehearsal.notes import NOTES, SERVING

TARGET = GPUTarget("cuda", 90, 32)


class Pointer:
    """The attributes of a tensor that Triton's binder reads; allocations are aligned, as PyTorch's are."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self.at = (1 << 20) + tensor.storage_offset() * tensor.element_size() if tensor.numel() else 0

    def data_ptr(self) -> int:
        return self.at


class Launches:
    """Binds launches and compiles new variants to Triton's first representation."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.compiled = set[Any]()

    def replace_triton(self) -> None:
        properties = {"multiprocessor_count": 132, "max_shared_mem": 232448, "warpSize": 32, "max_num_regs": 65536}
        driver._active = types.SimpleNamespace(
            get_current_target=lambda: TARGET,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            is_active=lambda: True,
            get_active_torch_device=lambda: CUDA,
            utils=types.SimpleNamespace(get_device_properties=lambda device: properties),
        )
        active = type("Active", (), {"is_active": staticmethod(lambda: True)})
        backends["cpu"] = Backend(compiler=backends["nvidia"].compiler, driver=active)  # vLLM's CPU build asks for it
        launches = self
        JITFunction.run = lambda kernel, *args, grid, warmup, **kwargs: launches.launch(kernel, args, kwargs)

    def launch(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.gpu.operations += 1
        kwargs["debug"] = False
        for name, value in (("instrumentation_mode", ""), ("fpsan_homomorphic_casts", None)):
            if hasattr(knobs.compilation, name):
                kwargs[name] = getattr(knobs.compilation, name, value)
        for name, value in (dict(zip(kernel.arg_names, args, strict=False)) | kwargs).items():
            parts = value if isinstance(value, tuple) else (value,)
            if any(isinstance(part, Tensor) and not isinstance(part, FakeTensor) for part in parts):
                NOTES.add("device", f"kernel {kernel.__name__}: {name} is a tensor of the host")
        args = tuple(map(_pointer, args))
        kwargs = {name: _pointer(value) for name, value in kwargs.items()}
        _, keys, _, backend, binder = kernel.device_caches[0]
        bound, specialization, options = binder(*args, **kwargs)
        key = kernel.__name__, compute_cache_key(keys, specialization, options)
        if key in self.compiled:
            return
        self.compiled.add(key)
        options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
        try:
            self._compile(ASTSource(kernel, signature, constants, attributes), options, backend)
        except Exception as error:
            NOTES.add("type", f"{kernel.__name__}: {str(error).strip().splitlines()[-1][:300]}")
        if NOTES.phase in SERVING:
            types_ = " ".join(str(one[0]) for one in specialization)
            NOTES.add("compile", f"{kernel.__name__}: {types_[:160]}", ours="vllm_mtpc" in kernel.fn.__module__)

    def _compile(self, source: ASTSource, options: Any, backend: Any) -> None:
        with _disable_current_modes():
            from triton._C.libtriton import ir

            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            functions = backend.get_codegen_implementation(options)
            source.make_ir(TARGET, options, functions, backend.get_module_map(), context)


def _pointer(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value)(*map(_pointer, value))
    return Pointer(value) if isinstance(value, torch.Tensor) else value
