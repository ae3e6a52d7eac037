"""Copies of the target's modules that share its weights, and copies of vLLM's configs.

Where vLLM compiles a target, its CustomOps and IR operations (norms, activations, rotary positions) run their PyTorch
definitions, which inductor fuses. Our passes run the copies eagerly, where a definition is six launches, a kernel one.
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


def copy_modules(module: nn.Module, name: str, replace: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """Copy a container with its children; `replace` returns another module for (name, module), or None.

    A module without children is shared.
    """
    other = replace(name, module)
    if other is not None:
        return other
    if not module._modules:
        return module
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {
        key: child if child is None else copy_modules(child, f"{name}.{key}" if name else key, replace)
        for key, child in module._modules.items()
    }
    return twin


def copy_with_kernel(module: nn.Module) -> nn.Module | None:
    """Copy a CustomOp so that it runs the device's kernel; None for other modules and one of layers with weights."""
    if not isinstance(module, CustomOp) or any(any(True for _ in child.parameters()) for child in module.children()):
        return None
    twin = copy.copy(module)
    twin._enforce_enable = True
    twin._forward_method = twin.dispatch_forward(compile_native=False)
    return twin


def replace_attributes(config: Any, **attributes: Any) -> Any:
    """Copy one of vLLM's configs with other attributes, without its validation."""
    twin = copy.copy(config)
    for name, value in attributes.items():
        object.__setattr__(twin, name, value)  # the configs validate assignments against each other
    return twin


def eager_priorities(vllm_config: VllmConfig) -> IrOpPriorityConfig:
    """Return the providers of IR operations in eager code: the user's first, then vLLM's default without a compiler."""
    uncompiled_config = replace_attributes(vllm_config.compilation_config, mode=CompilationMode.NONE)
    config = replace_attributes(vllm_config, compilation_config=uncompiled_config)
    priorities = asdict(current_platform.get_default_ir_op_priority(config))
    for name, given in asdict(vllm_config.kernel_config.ir_op_priority).items():
        named = [provider for provider in given if provider != "native"]
        priorities[name] = list(dict.fromkeys([*named, *priorities[name]]))
    return IrOpPriorityConfig(**priorities)
