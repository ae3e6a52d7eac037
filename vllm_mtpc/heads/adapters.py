"""LoRA draft layers: the last layers of the target once more, with adapters, for the head to read (MtPC paper).

              trunk: the first N - K layers, frozen, run once
        ┌───────────────┴──────────────┐
   draft: the last K layers      verifier: the last K layers
   with LoRA, final norm         as they are, final norm
        │                              │
    head reads it                 lm_head reads it

The draft layers are copies that share the target's weights and add their own low-rank ones; the target itself is not
touched, so its states are bit for bit what they are without adapters. Every pass runs the target's own forward (masks,
rotary positions, final norm) on a view of the backbone in which layers are exchanged: nothing of a model is written
again here.

On disk: PEFT's files, `adapter_config.json` and `adapter_model.safetensors`, as `PeftModel.from_pretrained` reads them;
`vllm_mtpc.checkpoint.save_head` writes them with the head.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.files import open_tensors, read_json

if TYPE_CHECKING:
    from vllm_mtpc.hf import Target

ALLOWED_LAYERS = (1, 2, 4)
# The projections of llama-like layers; those that a layer has are adapted.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER = "default"  # PEFT's name of an only adapter; it is not in the names of saved tensors
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"


class DraftLayers(nn.Module):
    """The last `layers` layers of a target with LoRA; its parameters are the adapters', float32, and nothing else.

    `rank` and `alpha` are PEFT's r and lora_alpha: the update is alpha / rank * B A, and B starts at zero, so that
    drafts start at the target's own states. A's initial values come from torch's generator. Raises HeadConfigError
    for a target whose layers cannot be split off.
    """

    def __init__(self, target: Target, layers: int, rank: int = 16, alpha: int = 16) -> None:
        super().__init__()
        from peft import LoraConfig, TaskType, inject_adapter_in_model

        backbone = _check(target, layers, rank, alpha)
        total = len(backbone.layers)
        first = total - layers
        copies = [_sharing_copy(layer) for layer in backbone.layers[first:]]
        names = {name.rpartition(".")[2] for name, module in copies[0].named_modules() if isinstance(module, nn.Linear)}
        self.config = LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=rank,
            lora_alpha=alpha,
            lora_dropout=0.0,
            target_modules=[name for name in MODULES if name in names],
            layers_to_transform=list(range(first, total)),
            layers_pattern="layers",
        )
        if not self.config.target_modules:
            raise HeadConfigError(
                f"target {target.name}: its layers have none of {', '.join(MODULES)}; draft layers need a llama-like "
                "target; set lora_layers to 0"
            )
        skipped, entry = [_Skip(layer) for layer in backbone.layers[1:first]], _Entry(backbone.layers[0])
        through = [_Skip(layer) for layer in backbone.layers[first:]]
        draft = _view(backbone, [entry, *skipped, *copies])
        inject_adapter_in_model(self.config, draft, ADAPTER)
        # PEFT saves the names of the whole causal LM inside its own wrapper.
        self._prefix = f"base_model.model.{target.model.base_model_prefix}."
        # A tuple is no submodule: the target's weights are neither parameters of this module nor in its state.
        self._entry = (entry,)
        self._target = (target,)
        self._trunk = (_view(backbone, [*backbone.layers[:first], *through], norm=nn.Identity()),)
        self._draft = (draft,)
        self._verifier = (_view(backbone, [entry, *skipped, *backbone.layers[first:]]),)
        self._weights = nn.ParameterDict()
        self._names: dict[str, str] = {}  # name on disk -> name here: a parameter's name has no dots
        for name, value in draft.named_parameters():
            if ".lora_" in name:
                value.data = value.data.float()
                key = name.replace(".", "/")
                self._weights[key] = value
                self._names[self._prefix + name.replace(f".{ADAPTER}.", ".")] = key

    @torch.no_grad()
    def trunk(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """What the first of the last K layers reads, [B, S, D] of tokens[B, S]; documents[B, S] as in Target.hidden."""
        target = self._target[0]
        arguments = {"input_ids": tokens.to(target.device, torch.long)}
        return self._run(self._trunk[0], arguments, documents)

    def draft(self, trunk: Tensor, documents: Tensor | None = None) -> Tensor:
        """States [B, S, D] after the draft layers and the final norm, with gradients to the adapters."""
        return self._last_layers(self._draft[0], trunk, documents)

    forward = draft

    @torch.no_grad()
    def verifier(self, trunk: Tensor, documents: Tensor | None = None) -> Tensor:
        """The target's own states [B, S, D]: bit for bit those of Target.hidden."""
        return self._last_layers(self._verifier[0], trunk, documents)

    def files(self, target: str) -> dict[str, bytes]:
        """Contents of the adapter's files by name, the weights in float32; `target` is how they name their target."""
        from safetensors.torch import save

        tensors = {name: self._weights[key].detach().cpu().contiguous() for name, key in sorted(self._names.items())}
        config = {key: _plain(value) for key, value in self.config.to_dict().items()}
        config |= {"inference_mode": True, "base_model_name_or_path": target}
        return {
            ADAPTER_WEIGHTS_FILE: save(tensors, metadata={"format": "pt"}),
            ADAPTER_CONFIG_FILE: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
        }

    @classmethod
    def load(cls, folder: Path | str, target: Target) -> DraftLayers:
        """The draft layers saved in a folder, on `target`. Raises HeadConfigError where they are not for it.

        `vllm_mtpc.checkpoint.load_head` and `check_tensors` have checked a head's files before.
        """
        folder = Path(folder)
        config = read_json(folder / ADAPTER_CONFIG_FILE)
        split = cls(target, len(config["layers_to_transform"]), config["r"], config["lora_alpha"])
        with open_tensors(folder / ADAPTER_WEIGHTS_FILE) as handle:
            tensors = {name: handle.get_tensor(name) for name in sorted(handle.keys())}
        shapes = {name: tuple(split._weights[key].shape) for name, key in split._names.items()}
        if shapes != {name: tuple(value.shape) for name, value in tensors.items()}:
            raise HeadConfigError(
                f"{folder / ADAPTER_WEIGHTS_FILE}: its tensors are not those of the last {split.num_layers} layers of "
                f"{target.name}; name the target the head was trained for"
            )
        with torch.no_grad():
            for name, key in split._names.items():
                split._weights[key].copy_(tensors[name])
        return split

    @property
    def num_layers(self) -> int:
        """K."""
        return len(self.config.layers_to_transform)

    def _last_layers(self, view: nn.Module, trunk: Tensor, documents: Tensor | None) -> Tensor:
        # The embeddings only say shape, dtype and device: the entry layer puts the trunk in their place, after
        # whatever a model does to embeddings (Gemma scales them).
        self._entry[0].states = trunk
        try:
            return self._run(view, {"inputs_embeds": trunk}, documents)
        finally:
            self._entry[0].states = None

    def _run(self, view: nn.Module, arguments: dict[str, Tensor], documents: Tensor | None) -> Tensor:
        from vllm_mtpc.hf.attention import packed_arguments

        target = self._target[0]
        packed = {} if documents is None else packed_arguments(documents.to(target.device), target.attention)
        return view(**arguments, use_cache=False, **packed).last_hidden_state


class _Skip(nn.Module):
    """In the place of a layer: hands its input on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        if hasattr(layer, "attention_type"):  # some models choose a layer's mask by it
            self.attention_type = layer.attention_type

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class _Entry(_Skip):
    """In the place of the first layer: hands on the trunk's states, whatever it is given."""

    states: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.states


def _view(backbone: nn.Module, layers: list[nn.Module], **replaced: nn.Module) -> nn.Module:
    """The backbone with other layers: a shallow copy, every other module and weight is the same object."""
    view = copy.copy(backbone)
    view.__dict__["_modules"] = {**backbone._modules, "layers": nn.ModuleList(layers), **replaced}
    return view


def _sharing_copy(layer: nn.Module) -> nn.Module:
    """A copy of a layer's modules around the same weights."""
    shared = [*layer.parameters(), *layer.buffers()]
    return copy.deepcopy(layer, {id(tensor): tensor for tensor in shared})


def _plain(value: Any) -> Any:
    """A value of PEFT's config as JSON has it."""
    return sorted(value) if isinstance(value, set) else getattr(value, "value", value)


def _check(target: Target, layers: int, rank: int, alpha: int) -> nn.Module:
    """The target's backbone; raises HeadConfigError where it cannot be split as asked."""
    backbone = target.backbone
    if layers not in ALLOWED_LAYERS:
        raise HeadConfigError(f"lora_layers={layers}: allowed are 1, 2 and 4 (and 0: none); set lora_layers to one")
    if rank < 1 or alpha <= 0:
        raise HeadConfigError(
            f"rank={rank}, alpha={alpha} of the draft layers: allowed are numbers from 1; set them so"
        )
    if not isinstance(getattr(backbone, "layers", None), nn.ModuleList) or "norm" not in backbone._modules:
        raise HeadConfigError(
            f"target {target.name}: {type(backbone).__name__} is not made of `layers` and a final `norm`, so its last "
            "layers cannot be split off; set lora_layers to 0"
        )
    if layers >= len(backbone.layers):
        raise HeadConfigError(
            f"lora_layers={layers} of target {target.name} with {len(backbone.layers)} layers: one at least stays "
            "below the draft layers; lower lora_layers"
        )
    return backbone
