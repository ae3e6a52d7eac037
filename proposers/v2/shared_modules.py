"""Modules of the target once more: containers are copied, everything that holds weights is shared.

Such copies cost their adapters and nothing else, and the target's tree stays as it is. Where vLLM compiles a target,
its CustomOps and IR operations (norms, activations, rotary positions) are their PyTorch definitions, for inductor to
fuse. Our passes run the copies eagerly, where a definition is half a dozen launches and the kernel is one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CompilationMode
from vllm.config.kernel import IrOpPriorityConfig
from vllm.model_executor.custom_op import CustomOp
from vllm.platforms import current_platform


def copied(module: nn.Module, name: str, replace: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """A copy of a container with its children copied or replaced; a module without children is shared."""
    other = replace(name, module)
    if other is not None:
        return other
    if not module._modules:
        return module
    twin = copy.copy(module)
    children = {
        key: child if child is None else copied(child, f"{name}.{key}" if name else key, replace)
        for key, child in module._modules.items()
    }
    twin.__dict__["_modules"] = children
    return twin


def with_kernel(module: nn.Module) -> nn.Module | None:
    """A copy of a CustomOp that runs the device's kernel, around the same tensors; None for any other module.

    One that holds layers with weights is no single kernel: what is in it is looked at instead.
    """
    if not isinstance(module, CustomOp) or any(any(True for _ in child.parameters()) for child in module.children()):
        return None
    twin = copy.copy(module)
    twin._enforce_enable = True
    twin._forward_method = twin.dispatch_forward(compile_native=False)
    return twin


def changed(config: Any, **attributes: Any) -> Any:
    """A copy of one of vLLM's configs with other attributes, which it is not asked about: they are nobody's options."""
    twin = copy.copy(config)
    for name, value in attributes.items():
        object.__setattr__(twin, name, value)  # the configs validate assignments against each other
    return twin


def eager_priorities(vllm_config: VllmConfig) -> IrOpPriorityConfig:
    """The providers of IR operations outside of compiled code: the user's first, then what vLLM takes uncompiled."""
    uncompiled_config = changed(vllm_config.compilation_config, mode=CompilationMode.NONE)
    config = changed(vllm_config, compilation_config=uncompiled_config)
    uncompiled = asdict(current_platform.get_default_ir_op_priority(config))
    for name, given in asdict(vllm_config.kernel_config.ir_op_priority).items():
        named = [provider for provider in given if provider != "native"]
        uncompiled[name] = list(dict.fromkeys([*named, *uncompiled[name]]))
    return IrOpPriorityConfig(**uncompiled)
