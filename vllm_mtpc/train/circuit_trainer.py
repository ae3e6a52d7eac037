"""Training of circuit heads, with or without draft layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_mtpc.checkpoint import load_head, read_circuit_config, resolve_head, save_head
from vllm_mtpc.checkpoint.locate import verifier_name
from vllm_mtpc.circuits import circuit_class, get_circuit
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.data.rows import Rows, choose_ids
from vllm_mtpc.errors import UsageError
from vllm_mtpc.heads import default_components, default_window
from vllm_mtpc.heads.head import build_head
from vllm_mtpc.heads.init import check_source, init_backbone, init_from_head, init_from_lm_head
from vllm_mtpc.heads.trunk.lora import LoraDraftLayers
from vllm_mtpc.hf import bind
from vllm_mtpc.train.cache import Computed, HiddenSource, write_cache
from vllm_mtpc.train.card import head_card, provenance
from vllm_mtpc.train.losses import CircuitModule
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.trainer import Trainer

DRAFTERS = ("mtp", "eagle3")  # one pass over a text gives the states of all its windows
STEPS_OF_A_BLOCK = 8  # of a backbone, or with minutes


class CircuitTrainer(Trainer):
    family_options = (
        "circuit", "components", "trunk", "leaves", "draft_vocab_size", "freeze_trunk", "beta", "acceptance",
        "train_first", "cache", "states", "engine",
    )  # fmt: skip
    noun, kind_option, chosen_by = "circuits", "circuit", "head mtpc"

    def setup_model(self) -> None:
        options, target = self.options, self.target
        if self.rows is not None and not options.init_from:
            trained = self.rows.tokens[self.rows.trained]
            self.ids = choose_ids(trained, target.vocab_size, options.draft_vocab_size)
            size = None if self.ids is None else len(self.ids)
            self.config = self.config.model_copy(update={"draft_vocab_size": size})
        self.head, self.layers = build_head(self.config), None
        if self.ids is not None:
            self.head.set_vocabulary(self.ids)
        if options.init_from:
            init_from_head(self.head, load_head(resolve_head(options.init_from))[1], options.seed)
        else:
            weight = target.model.get_output_embeddings().weight  # [heads * V, D], most models have one
            init_from_lm_head(self.head, weight.float().cpu(), options.seed)
            if self.config.trunk.kind == "backbone":
                self.partial_start = init_backbone(self.head.trunk.backbone, target)
        self.aux_layers = list(self.head.trunk.aux_layers)
        bind(self.head, target)
        if options.freeze_trunk:
            self.head.trunk.requires_grad_(False)
        if self.config.trunk.kind == "lora":
            trunk = self.config.trunk
            self.layers = LoraDraftLayers(target, layers=trunk.layers, rank=trunk.rank, alpha=trunk.alpha)
        self.loss_unit = "nats and total variation" if options.acceptance else "nats per token"
        self.model = CircuitModule(self.head, target, options, self.layers)

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        get_circuit(options.circuit, options.window or 2, options.components or 1)
        kind = options.trunk.get("kind")
        if options.freeze_trunk and not options.init_from:
            raise ValueError("freeze_trunk needs a trained trunk: set init_from to its head")
        if kind == "drafter" and (
            options.trunk.get("method", "mtp") not in DRAFTERS or options.states == "transformers"
        ):
            raise ValueError("trunk drafter: methods mtp and eagle3 are trained on, with states auto or vllm")
        if options.train_first and kind not in (None, "none", "lora"):
            raise ValueError(f"train_first with trunk {kind}, which has seen x_1: remove train_first")
        if kind == "lora" and options.cache:
            raise ValueError("cache holds the target's last states, draft layers need earlier ones: leave out cache")
        if kind == "lora" and options.states == "vllm":
            raise ValueError("states=vllm with trunk lora, which trains on the target's own layers: leave out states")

    @staticmethod
    def head_config(options: TrainOptions, target: Any, verifier: str, sizes: dict[str, Any]) -> HeadConfig:
        source = read_circuit_config(resolve_head(options.init_from)) if options.init_from else None
        parts = {"trunk": dict(options.trunk), "leaves": dict(options.leaves)}
        for name, given in parts.items():
            if source and given.get("kind") in (None, getattr(source, name).kind):  # what is not given is the source's
                parts[name] = getattr(source, name).model_dump() | given
        if (model := parts["trunk"].get("model")) and not source:
            parts["trunk"]["model"] = verifier_name(model, options.out)
        most = circuit_class(options.circuit).max_components
        # of a composite model, the sizes of its language model
        target = target.get_text_config().to_dict() | target.to_dict() | sizes
        return HeadConfig.create(
            circuit=options.circuit,
            num_components=options.components or min(default_components(sizes["vocab_size"]), most),
            window=options.window or default_window(sizes["vocab_size"]),
            target=target,
            verifier=verifier,
            num_speculative_tokens=options.num_speculative_tokens,
            draft_vocab_size=source and source.draft_vocab_size,
            **parts,
        )

    @staticmethod
    def check_start(options: TrainOptions, config: HeadConfig) -> None:
        if options.freeze_trunk and config.num_components == 1 and not config.leaves.token_rank:
            raise UsageError(
                f"freeze_trunk with circuit {options.circuit} of one component and no token_rank: nothing is left "
                "to learn; set components or leaves.token_rank"
            )
        with torch.device("meta"):
            head = build_head(config)
            if options.init_from:
                check_source(head, build_head(read_circuit_config(resolve_head(options.init_from))))

    def source(self, rows: Rows) -> HiddenSource:
        """Return the rows' states: of the cache folder, which is written if it is incomplete, or computed."""
        options, target = self.options, self.target
        if layers := self.config.lora_layers:
            return Computed(target, rows, layer=target.config.num_hidden_layers - layers)
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
        if self.config.lora_layers:
            return of_a_step
        largest = super().block_rows(source, world)
        is_bounded = self.config.trunk.kind == "backbone" or self.options.minutes
        return min(largest, STEPS_OF_A_BLOCK * of_a_step) if is_bounded else largest

    def save(self, results: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        config = self.config
        facts = {name: getattr(config, name) for name in ("window", "num_components", "draft_vocab_size")}
        facts |= {name: getattr(config, name).kind for name in ("circuit", "trunk", "leaves")}
        facts |= {"drafts": config.num_speculative_tokens}
        facts |= {"partial_start": self.partial_start} if self.partial_start else {}
        record = provenance(self.options, facts, self.verifier, results, run)
        record["settings"]["num_components"] = config.num_components
        dtype = getattr(torch, self.options.dtype)
        adapters = self.layers and self.layers.adapters
        save_head(self.options.out, self.config, self.head, record, head_card(record), dtype, adapters)
