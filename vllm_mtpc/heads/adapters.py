"""Adapters: layers that share a target's weights and add low-rank ones (trunk `lora`, PTP heads).

The target is not modified: every pass runs its own forward (masks, rotary positions, final norm) on a view of the
backbone with other layers. On disk: PEFT's files `adapter_config.json` and `adapter_model.safetensors`, written by
`vllm_mtpc.checkpoint.save_head`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from vllm_mtpc.errors import HeadConfigError

if TYPE_CHECKING:
    from peft import LoraConfig

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of llama-like layers
ADAPTER = "default"  # PEFT's name of a single adapter; saved tensors do not contain it
ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


class Adapters(NamedTuple):
    """LoRA adapters as PEFT saves them."""

    layers: list[int] | None  # of the target, 0-based; None: all
    rank: int
    alpha: float
    modules: list[str]
    tensors: Mapping[str, Tensor]  # by PEFT's names

    @property
    def num_layers(self) -> int:
        """Number of adapted layers; 0 if all are."""
        return len(self.layers or ())

    def files(self, target: str) -> dict[str, bytes]:
        """Return the contents of PEFT's files by file name; `target` is their base model's name."""
        from safetensors.torch import save

        config = lora_config(self.rank, self.alpha, self.modules, self.layers).to_dict()
        config |= {"inference_mode": True, "base_model_name_or_path": target, "target_modules": sorted(self.modules)}
        tensors = {name: value.detach().cpu().contiguous() for name, value in sorted(self.tensors.items())}
        return {
            ADAPTER_WEIGHTS_FILE: save(tensors, metadata={"format": "pt"}),
            ADAPTER_CONFIG_FILE: (json.dumps(config, indent=2, sort_keys=True, default=sorted) + "\n").encode(),
        }


def lora_config(rank: int, alpha: float, modules: list[str], layers: list[int] | None = None) -> LoraConfig:
    """Return PEFT's config of adapters alpha / rank * B A of `modules`, in 0-based `layers` (None: all)."""
    from peft import LoraConfig, TaskType

    some = {} if layers is None else {"layers_to_transform": layers, "layers_pattern": "layers"}
    alpha = int(alpha) if float(alpha).is_integer() else alpha
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=modules, **some
    )


class AdaptedLayers(nn.Module):
    """Layers that share the weights of a `vllm_mtpc.hf.Target` and have adapters, its only parameters, in float32."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self._target = (target,)  # in a tuple: its weights are neither parameters of this module nor in its state
        self._weights = nn.ParameterDict()  # by their names in the view, "/" for each dot

    @property
    def target(self) -> Any:
        """The `vllm_mtpc.hf.Target`."""
        return self._target[0]

    def adapt(self, view: nn.Module, rank: int, alpha: float, layers: list[int] | None = None) -> None:
        """Add adapters to the projections of a view (`view_of`) of the target's backbone; arguments: `lora_config`.

        Raises HeadConfigError for layers without any of the projections MODULES.
        """
        from peft import inject_adapter_in_model

        layer = view.layers[layers[0] if layers else 0]
        names = {name.rpartition(".")[2] for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        modules = [name for name in MODULES if name in names]
        if not modules:
            raise HeadConfigError(
                f"target {self.target.name}: its layers have none of {', '.join(MODULES)}; adapters need a llama-like "
                "target; set lora_layers to 0, or name another target"
            )
        inject_adapter_in_model(lora_config(rank, alpha, modules, layers), view, ADAPTER)
        self._made = layers, rank, alpha, modules
        for name, value in view.named_parameters():
            if ".lora_" in name:
                value.data = value.data.float()
                self._weights[name.replace(".", "/")] = value

    def lora(self) -> dict[str, Tensor]:
        """Return the adapters by their names on disk: PEFT's, of the whole causal LM inside its own wrapper."""
        prefix = f"base_model.model.{self.target.model.base_model_prefix}."
        names = {key: key.replace("/", ".").replace(f".{ADAPTER}.", ".") for key in self._weights}
        return {prefix + name: self._weights[key] for key, name in names.items()}

    @property
    def adapters(self) -> Adapters:
        """The adapters in the form in which they are saved."""
        return Adapters(*self._made, self.lora())

    @torch.no_grad()
    def take_lora(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy adapters into these; raises HeadConfigError if names or shapes differ."""
        ours = self.lora()
        if {name: value.shape for name, value in ours.items()} != {name: v.shape for name, v in tensors.items()}:
            raise HeadConfigError(
                f"the head's adapters are not those of the layers of {self.target.name}; name the target the "
                "head was trained for"
            )
        for name, value in ours.items():
            value.copy_(tensors[name])


def view_of(backbone: nn.Module, layers: list[nn.Module], **replaced: nn.Module) -> nn.Module:
    """Return a copy of a backbone with other layers and `replaced` modules; all others, and weights, are shared."""
    view = copy.copy(backbone)
    view.__dict__["_modules"] = {**backbone._modules, "layers": nn.ModuleList(layers), **replaced}
    return view


def sharing_copy(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer's modules that shares its weights."""
    return copy.deepcopy(layer, {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())})


def layered_backbone(target: Any) -> nn.Module:
    """Return the target's backbone; raises HeadConfigError if its layers cannot be replaced."""
    backbone = target.backbone
    if not isinstance(getattr(backbone, "layers", None), nn.ModuleList) or "norm" not in backbone._modules:
        raise HeadConfigError(
            f"target {target.name}: {type(backbone).__name__} is not made of `layers` and a final `norm`, so its "
            "layers cannot be adapted; set lora_layers to 0, or name another target"
        )
    return backbone
