"""Training of circuit heads, with or without draft layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_mtpc.checkpoint import load_head, read_circuit_config, resolve_head, save_head
from vllm_mtpc.checkpoint.locate import verifier_name
from vllm_mtpc.circuits import get_circuit
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.data.rows import Rows
from vllm_mtpc.errors import UsageError
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.heads import COMPONENTS, HEADS, HOSTED, build_head, check_head_name, default_head, head_options
from vllm_mtpc.heads.adapters import LoraDraftLayers
from vllm_mtpc.heads.backbone import BackboneHead
from vllm_mtpc.heads.hosted import DRAFTER, HostedHead
from vllm_mtpc.heads.init import check_source, init_backbone, init_from_head, init_from_lm_head
from vllm_mtpc.hf import bind
from vllm_mtpc.train.cache import Computed, HiddenSource, write_cache
from vllm_mtpc.train.card import head_card, provenance
from vllm_mtpc.train.losses import CircuitModule
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.trainer import Trainer

DRAFTERS = ("mtp", "eagle3")  # one pass over a text gives the states of all its windows
DRAFTER_RANK = 16  # default component_rank of heads on a drafter's states
STEPS_OF_A_BLOCK = 8  # of a backbone, or with minutes


class CircuitTrainer(Trainer):
    """Trains a circuit's head."""

    family_options = (
        "circuit", "components", *head_options(), "drafter", "freeze_backbone", "lora_layers", "beta", "acceptance",
        "train_first", "cache", "states", "engine",
    )  # fmt: skip
    noun, kind_option, chosen_by = "circuits", "circuit", "another head"

    def setup_model(self) -> None:
        options, target = self.options, self.target
        self.head, self.layers = build_head(self.config), None
        if options.init_from:
            init_from_head(self.head, load_head(resolve_head(options.init_from))[1], options.seed)
        else:
            weight = target.model.get_output_embeddings().weight  # [heads * V, D], most models have one
            init_from_lm_head(self.head, weight.float().cpu(), options.seed)
            if isinstance(self.head, BackboneHead):
                self.partial_start = init_backbone(self.head.backbone, target)
        self.aux_layers = list(self.head.aux_layers) if isinstance(self.head, BackboneHead) else []
        if isinstance(self.head, HostedHead):
            self.aux_layers = [DRAFTER]
        bind(self.head, target)
        if options.freeze_backbone:
            self.head.backbone.requires_grad_(False)
        if options.lora_layers:
            sizes = {"rank": options.lora_rank, "alpha": options.lora_alpha}
            self.layers = LoraDraftLayers(target, layers=options.lora_layers, **sizes)
        self.loss_unit = "nats and total variation" if options.acceptance else "nats per token"
        self.model = CircuitModule(self.head, target, options, self.layers)

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        if not options.lora_layers and (name := options.changed("lora_rank", "lora_alpha")):
            raise ValueError(f"{name} is of draft layers: remove {name}, or set lora_layers to 1, 2 or 4")
        get_circuit(options.circuit, options.window, options.num_components)
        if options.head:
            check_head_name(options.head, *[method for method, family in FAMILIES.items() if family.trainer is not cls])
        if options.freeze_backbone and (options.head != "backbone" or not options.init_from):
            raise ValueError("freeze_backbone needs a trained backbone: set head: backbone and init_from to its head")
        if bool(options.drafter) != (options.head in HOSTED):
            raise ValueError("drafter goes with head hosted or product: set head: hosted and drafter: mtp, or neither")
        if options.drafter and (options.drafter.partition(":")[0] not in DRAFTERS or options.states == "transformers"):
            raise ValueError("drafter: allowed are mtp and eagle3:CHECKPOINT, with states auto or vllm")
        if options.head in ("backbone", *HOSTED) and options.train_first:
            raise ValueError(f"train_first with head {options.head}, which is conditioned on x_1: remove train_first")
        if options.lora_layers and options.cache:
            raise ValueError("cache holds the target's last states, draft layers need earlier ones: leave out cache")
        if options.lora_layers and options.states == "vllm":
            raise ValueError("states=vllm with lora_layers, which train on the target's own layers: leave out states")

    @staticmethod
    def head_config(options: TrainOptions, target: Any, verifier: str, sizes: dict[str, Any]) -> HeadConfig:
        fields = {name: getattr(options, name) for name in head_options()}
        source = read_circuit_config(resolve_head(options.init_from)) if options.init_from else None
        head = options.head or (source.head if source else default_head(sizes["vocab_size"]))
        drafter = options.hosted and options.hosted.model_dump()
        if drafter and drafter["model"]:
            drafter["model"] = verifier_name(drafter["model"], options.out)
        if source and source.head == head:  # options that are not given are those of the source
            fields = {name: getattr(source, name) if value is None else value for name, value in fields.items()}
        # of a composite model, the sizes of its language model
        target = target.get_text_config().to_dict() | target.to_dict() | sizes
        is_new = source is None and fields["component_rank"] is None and COMPONENTS in HEADS[head].options
        if is_new and options.num_components > 1 and COMPONENTS.of_target:
            fields["component_rank"] = COMPONENTS.of_target(target) or (DRAFTER_RANK if head in HOSTED else None)
        return HeadConfig.create(
            circuit=options.circuit,
            window=options.window,
            num_components=options.num_components,
            target=target,
            verifier=verifier,
            head=head,
            num_speculative_tokens=options.num_speculative_tokens,
            lora_layers=options.lora_layers,
            drafter=drafter,
            **fields,
        )

    @staticmethod
    def check_start(options: TrainOptions, config: HeadConfig) -> None:
        if options.freeze_backbone and options.num_components == 1 and not config.token_rank:
            raise UsageError(
                f"freeze_backbone with circuit {options.circuit} of one component and no token_rank: nothing is left "
                "to learn; set components or token_rank"
            )
        with torch.device("meta"):
            head = build_head(config)
            if options.init_from:
                check_source(head, build_head(read_circuit_config(resolve_head(options.init_from))))

    def source(self, rows: Rows) -> HiddenSource:
        """Return the rows' states: of the cache folder, which is written if it is incomplete, or computed."""
        options, target = self.options, self.target
        if options.lora_layers:
            return Computed(target, rows, layer=target.config.num_hidden_layers - options.lora_layers)
        if options.cache:
            return write_cache(options.cache, target, rows, layers=self.aux_layers)
        return Computed(target, rows, layers=self.aux_layers)

    def state_size(self) -> int:
        return (len(self.aux_layers) + 1) * self.target.hidden_size

    def block_rows(self, source: HiddenSource, world: int) -> int:
        """As in Trainer; with draft layers the rows of one step, with a backbone or minutes those of a few steps.

        Draft layers run over whole rows; the states of a large block take too long for a run of a few minutes.
        """
        per_row = max(1, int(source.rows.trained.sum()) // len(source.rows.trained))
        of_a_step = max(world, self.options.windows_per_step // per_row)
        if self.options.lora_layers:
            return of_a_step
        largest = super().block_rows(source, world)
        is_bounded = self.options.head == "backbone" or self.options.minutes
        return min(largest, STEPS_OF_A_BLOCK * of_a_step) if is_bounded else largest

    def save(self, results: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        names = ("circuit", "window", "num_components", "head", "lora_layers")
        facts = {name: getattr(self.config, name) for name in names} | {"drafts": self.config.num_speculative_tokens}
        facts |= {"partial_start": self.partial_start} if self.partial_start else {}
        record = provenance(self.options, facts, self.verifier, results, run)
        record["settings"]["num_components"] = self.options.num_components
        dtype = getattr(torch, self.options.dtype)
        adapters = self.layers and self.layers.adapters
        save_head(self.options.out, self.config, self.head, record, head_card(record), dtype, adapters)

    def load_trained(self, weights: Mapping[str, Tensor]) -> None:
        with torch.device("meta"):
            self.head = build_head(self.config)
        self.head.load_state_dict(weights, assign=True)
