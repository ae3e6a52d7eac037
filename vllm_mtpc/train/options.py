"""Options of a training run: typed sections, the same keys in a YAML file and as flags; unknown keys are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from vllm_mtpc.circuits import CIRCUITS
from vllm_mtpc.data.sources import is_path
from vllm_mtpc.errors import UsageError, validate
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.flags import JsonDict
from vllm_mtpc.heads.leaves import LEAVES
from vllm_mtpc.heads.sections import Table
from vllm_mtpc.heads.trunk import TRUNKS

STATE_FOLDER = "state"  # in the out folder
SELF_PROMPTS = 20_000  # default number of conversations that the target writes
DEFAULT_METHOD = "mtpc"


PARTS: dict[str, Table] = {"trunk": TRUNKS, "leaves": LEAVES}  # sections: --trunk KIND, --trunk.OPTION VALUE


def _section(name: str, default: str) -> str:
    return f"{PARTS[name].part}: one of {', '.join(PARTS[name].places)} (default: {default})"


class TrainOptions(BaseModel):
    """Every option of `vllm-mtpc train`: a field is a key of the YAML file and, with dashes, a flag."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    groups: ClassVar[dict[str, str]] = {  # titles of the help, by the first option of each group
        "target": "Target, data and output; --target, --out and --data or --prompts self are required",
        "circuit": "Head",
        "variant": "PTP head (--head ptp)",
        "gamma": "Loss",
        "epochs": "Steps and optimiser",
        "seq_len": "Text and hidden states",
        "save_minutes": "Saving and measuring",
    }

    target: str = Field(min_length=1, description="causal language model on transformers: folder or hub name")
    data: list[str] = Field([], description="text, folder, glob, .jsonl, or datasets name NAME:CONFIG")
    out: Path = Field(description="folder of the head; trainer state and plots go there too")
    split: str = Field("train", description="split of a datasets name")
    validation_data: list[str] = Field([], description="held-out data; without it a share of the data is held out")
    verifier: str | None = Field(None, description="the target's name in the head (default: relative path, or name)")
    dtype: Literal["float16", "bfloat16", "float32"] = Field("float16", description="of the weights on disk")
    dry_run: bool = Field(False, description="write the untrained head and stop")
    circuit: str = Field("btree", description=f"one of {', '.join(CIRCUITS)}")
    window: int | None = Field(
        None, ge=2, description="n, tokens of a window, the target's own included (default: 16, 8 above 2,000 ids)"
    )
    components: int | None = Field(
        None, ge=1, description="r, latent states (default: 32, 4 above 2,000 ids, or the most a circuit has)"
    )
    head: Literal["mtpc", "ptp"] = Field("mtpc", description="family: circuits, or PTP")
    trunk: dict[str, Any] = Field({}, description=_section("trunk", "mlp above 2,000 ids, none below"))
    leaves: dict[str, Any] = Field({}, description=_section("leaves", "lm_head above 2,000 ids, own below"))
    draft_vocab_size: int | None = Field(
        None,
        ge=0,
        description="ids that are drafted, the most frequent of the data; 0: all (default: all up to 16384, above the "
        "smallest power of two from 8192 that covers 99 % of the data)",
    )
    init_from: str | None = Field(
        None, description="head to start from: of the same kind and circuit, or of ff or cp, also of a smaller window"
    )
    freeze_trunk: bool = Field(False, description="the trunk stays that of init_from")
    num_speculative_tokens: int | None = Field(None, ge=1, description="drafts per step when served (default: n - 1)")
    variant: Literal["o-ptp", "c-ptp", "late", "independent"] = Field(
        "o-ptp", description="kind of drafts: docs/ptp.md"
    )
    lora_rank: int = Field(16, ge=1, description="rank of the adapters of every layer")
    lora_alpha: int = Field(16, ge=1, description="scale of the adapters, by their rank")
    u_features: int = Field(64, ge=1, le=4096, description="thresholds of the embedding of u")
    late_width: int | None = Field(None, ge=1, description="variant late: width of its network (default: D)")
    distribution_trust: float | None = Field(
        None, gt=0, lt=1, description="variant late: trust in its network (default: 0.85)"
    )
    ptp_loss: Literal["ce", "bce", "kl", "reverse-kl", "inverse"] | None = Field(
        None, description="loss of the rows (default: by variant)"
    )
    proposals: Literal["teacher", "student"] = Field(
        "teacher", description="trained on the data, or on tokens that the target selects after the student's drafts"
    )
    u_beta: float = Field(1.0, gt=0, description="place of u in the interval of the data's token: Beta(b, b)")
    temperature: float = Field(1.0, gt=0, description="of the distribution that u picks from")
    top_k: int = Field(0, ge=0, description="top-k of that distribution; 0: off")
    top_p: float = Field(1.0, gt=0, le=1, description="top-p of that distribution; 1: off")
    gamma: float = Field(0.9, gt=0, le=1, description="position k counts gamma^(k-1)")
    beta: float = Field(1.0, ge=0, le=1, description="share of KL(target||draft); the rest is likelihood of the text")
    acceptance: float = Field(
        0.9, ge=0, le=1, description="share of the total variation between target and draft in the loss"
    )
    train_first: bool = Field(False, description="also train x_1, which the target samples when it serves")
    epochs: float | None = Field(None, gt=0, description="passes over the data (default: 1; no limit with minutes)")
    max_steps: int | None = Field(None, ge=1, description="optimiser steps, in place of epochs")
    minutes: float | None = Field(None, gt=0, description="stop training after this time, and write the head")
    windows_per_step: int = Field(4096, ge=1, description="windows of one optimiser step, over all processes")
    chunk_windows: int | None = Field(None, ge=1, description="windows whose logits exist at once (default: 1 GiB)")
    learning_rate: float | None = Field(None, gt=0, description="peak rate of AdamW (default: 1.2 / hidden size)")
    precision: Literal["float32", "bf16"] = Field("float32", description="bf16: autocast of the head's products")
    seed: int = Field(0, ge=0, description="the run repeats with it")
    seq_len: int | None = Field(None, ge=4, description="tokens of a packed row (default: 1,024, or the most possible)")
    states: Literal["auto", "transformers", "vllm"] = Field(
        "auto", description="what computes hidden states; auto: vLLM for quantised, hybrid and divided targets"
    )
    engine: JsonDict = Field({}, description='options of that vLLM, as {"tensor_parallel_size": 2}')
    cache: Path | None = Field(None, description="folder of hidden states on disk; written if it does not exist")
    block_rows: int | None = Field(None, ge=1, description="rows whose windows are shuffled together (default: 1 GiB)")
    regenerate: int = Field(0, ge=0, description="train on this many responses that vLLM writes first; 0: on the data")
    prompts: Literal["data", "self"] = Field(
        "data", description="self: the target writes the prompts of regenerate (default then: 20,000), without data"
    )
    target_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of the target")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    attention: Literal["auto", "torch", "xformers"] = Field("auto", description="attention over packed rows")
    save_minutes: float = Field(10.0, ge=0, description="between trainer states; the last one is kept")
    resume: bool = Field(False, description="go on from the trainer state in the out folder")
    log_every: int = Field(10, ge=1, description="steps between lines of metrics.jsonl")
    evaluation_sequences: int | None = Field(None, ge=0, description="held-out texts (default: up to 64); 0: none")
    evaluation_tokens: int = Field(96, ge=1, description="tokens of each")

    @field_validator("trunk", "leaves", mode="before")
    @classmethod
    def _parse_section(cls, value: Any, info: ValidationInfo) -> Any:
        value = {"kind": value} if isinstance(value, str) else value
        table = PARTS[info.field_name or ""]
        if not isinstance(value, dict):
            raise ValueError(f"a kind or a section is expected, for example {next(iter(table.places))}")
        known = table.find(value["kind"]).Options.model_fields if "kind" in value else {"kind": None, **table.fields()}
        if wrong := next((name for name in value if name not in known), None):
            allowed = ", ".join(name for name in known if name != "kind") or "none"
            raise ValueError(f"{wrong!r} is not an option of it; allowed: {allowed}; remove it")
        return value

    @model_validator(mode="before")
    @classmethod
    def _add_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        own = {"regenerate": SELF_PROMPTS} if values.get("prompts") == "self" else {}
        return {**_trainer(values.get("head")).defaults, **own, **values}

    @model_validator(mode="after")
    def _consistent(self) -> TrainOptions:
        for trainer in self._other_trainers():
            if name := self.changed(*trainer.family_options):
                raise ValueError(f"{name} is an option of {trainer.noun}: remove {name}, or set {trainer.chosen_by}")
        if not (self.data or (self.prompts == "self" and self.regenerate)):
            raise ValueError("data is missing; type --data NAMES, or --prompts self")
        names = [*self.data, *self.validation_data]
        if self.changed("split") and all(is_path(name) and not Path(name).expanduser().is_dir() for name in names):
            raise ValueError(
                f"split={self.split!r} is an option of data sets, and data are files: remove split, or name the files "
                "of that split"
            )
        self.trainer.check(self)
        return self

    def changed(self, *names: str) -> str | None:
        """Return the first of the options that has a value other than its default."""
        present, fields = self.model_fields_set.intersection(names), type(self).model_fields
        return next((name for name in names if name in present and getattr(self, name) != fields[name].default), None)

    @property
    def trainer(self) -> Any:
        return _trainer(self.head)

    @property
    def needs_modules(self) -> bool:
        """Whether more of the target is read than states, which vLLM may compute."""
        return self.trainer.needs_modules or self.trunk.get("kind") == "lora"

    def states_of(self, target: Any) -> str:
        """Return what computes the states of a target of this transformers config."""
        if self.trunk.get("kind") == "drafter":
            return "vllm"
        if self.states != "auto" or self.needs_modules:
            return "vllm" if self.states == "vllm" else "transformers"
        from vllm_mtpc.engine.served_target import must_be_served

        return "vllm" if must_be_served(target, self.engine) else "transformers"

    @property
    def of_others(self) -> set[str]:
        return {name for trainer in self._other_trainers() for name in trainer.family_options}

    def _other_trainers(self) -> list[Any]:
        return [family.trainer for family in FAMILIES.values() if not issubclass(self.trainer, family.trainer)]

    @property
    def needs_distribution(self) -> bool:
        """Whether the loss of a circuit needs the target's distribution over the vocabulary."""
        return self.beta > 0 or self.acceptance > 0


def _trainer(head: Any) -> Any:
    return FAMILIES[head if head in tuple(FAMILIES) else DEFAULT_METHOD].trainer


def parse(values: dict[str, Any], source: str = "options") -> TrainOptions:
    """Return validated options; raises UsageError."""
    return validate(TrainOptions, values, UsageError, f"{source}: ")
