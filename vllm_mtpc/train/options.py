"""What a training run is: one flat set of options, the same as a YAML file and as flags; unknown keys are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, create_model, model_validator

from vllm_mtpc.circuits import CIRCUITS
from vllm_mtpc.data.names import is_path
from vllm_mtpc.errors import UsageError, one_line
from vllm_mtpc.heads import head_options, option_fields

# Options of one kind of head alone, and the defaults a PTP head has of its own.
CIRCUIT_OPTIONS = (
    "circuit", "components", *head_options(), "init", "lora_layers", "beta", "kl", "kl_form", "acceptance",
    "acceptance_form", "train_first", "checkpoint_circuit", "regenerate_greedy_share", "cache",
)  # fmt: skip
PTP_OPTIONS = (
    "variant", "informed", "u_embedding", "u_features", "u_hidden", "late_width", "late_only", "law_trust", "ptp_loss",
    "proposals", "u_beta", "temperature", "top_k", "top_p",
)  # fmt: skip
REGENERATE_OPTIONS = (
    "regenerate_prompt_tokens", "regenerate_crops", "regenerate_tokens", "regenerate_greedy_share", "regenerate_memory",
)  # fmt: skip
PTP_DEFAULTS = {"windows_per_step": 512, "learning_rate": 1e-3}
STATE_FOLDER, STATE_FILE = "state", "trainer.pt"  # in the out folder
PTP_LOSSES = {"o-ptp": ("ce", "bce", "kl"), "c-ptp": ("kl", "reverse-kl", "inverse")}


class TrainOptions(create_model("HeadOptions", **option_fields())):
    """Every option of `vllm-mtpc train`. A field is a key of the YAML file and, with dashes, a flag."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # what is trained, on what, to where
    target: str = Field(min_length=1, description="causal language model on transformers: folder or hub name")
    data: list[str] = Field(
        min_length=1, description="text file, folder, glob, .jsonl, .bin, or datasets name (NAME:CONFIG); repeatable"
    )
    out: Path = Field(description="folder of the head; trainer state and plots go there too")
    split: str = Field("train", description="split of a datasets name")
    validation_data: list[str] = Field([], description="held-out data; without it a share of the data is held out")
    validation_share: float = Field(0.02, gt=0, lt=0.5, description="share of documents held out")

    # the head
    circuit: str = Field("btree", description=f"one of {', '.join(CIRCUITS)}")
    window: int = Field(16, ge=2, description="n, tokens of a window, the target's own included")
    components: int | None = Field(None, ge=1, description="r, latent states (default: 32, or the most a circuit has)")
    head: str = Field("linear", description="linear, shared (large vocabularies), mlp or transformer; or ptp")
    init: Literal["lm-head", "random"] = Field("lm-head", description="start of a new head")
    init_from: str | None = Field(
        None, description="head folder to start from: the same kind; its circuit, or one that has no inner sums"
    )
    lora_layers: Literal[0, 1, 2, 4] = Field(0, description="target layers that get draft adapters")
    lora_rank: int = Field(16, ge=1, description="rank of the adapters")
    lora_alpha: int = Field(16, ge=1, description="scale of the adapters, by their rank")

    # a PTP head (--head ptp)
    variant: Literal["o-ptp", "c-ptp"] = Field("o-ptp", description="o-ptp: rows name tokens; c-ptp: they give laws")
    informed: bool = Field(True, description="rows carry u; off: the independent baseline")
    u_embedding: str = Field("ieee", description="how u is embedded: ieee, scalar, threshold, arithmetic, ...")
    u_features: int | None = Field(None, ge=1, description="features of u, where the embedding leaves it open")
    u_hidden: int | None = Field(None, ge=1, description="width of an embedding in -mlp (default: D)")
    late_width: int = Field(0, ge=0, description="width of the late network behind the final norm; 0: none")
    late_only: bool = Field(False, description="train the late network alone, the rest as it is in init_from")
    law_trust: float | None = Field(
        None, gt=0, lt=1, description="u picks drafts from rows' laws, trusted so far (default: as the variant does)"
    )
    ptp_loss: Literal["ce", "bce", "kl", "reverse-kl", "inverse"] | None = Field(
        None, description="o-ptp: ce (default), bce or kl; c-ptp: kl (default), reverse-kl or inverse (no teacher)"
    )
    proposals: Literal["teacher", "dataset", "student"] = Field(
        "teacher", description="whose continuations are learnt: the target's (the data are its text), any text, its own"
    )
    u_beta: float = Field(1.0, gt=0, description="place of u in its token's interval: Beta(b, b)")
    temperature: float = Field(1.0, gt=0, description="of the law that u picks from")
    top_k: int = Field(0, ge=0, description="top-k of that law; 0: off")
    top_p: float = Field(1.0, gt=0, le=1, description="top-p of that law; 1: off")

    # the loss (docs/training.md)
    gamma: float = Field(0.9, gt=0, le=1, description="position k counts gamma^(k-1)")
    beta: float = Field(1.0, ge=0, le=1, description="share of KL to the target; the rest is likelihood of the text")
    kl: Literal["forward", "reverse"] = Field("forward", description="direction: KL(target||draft) or the reverse")
    kl_form: Literal["full", "binary"] = Field(
        "full", description="over the vocabulary, or this token against the rest"
    )
    acceptance: float = Field(0.9, ge=0, le=1, description="share of the acceptance loss in the whole")
    acceptance_form: Literal["length", "tv", "log"] = Field(
        "tv", description="expected accepted length, total variation, or -log of the overlap"
    )
    train_first: bool = Field(False, description="also learn x_1, which serving is given by the target")

    # how long, how fast
    epochs: float = Field(1.0, gt=0, description="passes over the windows of the data")
    max_steps: int | None = Field(None, ge=1, description="optimiser steps, in place of epochs")
    windows_per_step: int = Field(4096, ge=1, description="windows of one optimiser step, over all processes")
    grad_accumulation: int = Field(1, ge=1, description="backward passes a step is split into")
    chunk_windows: int | None = Field(
        None, ge=1, description="windows whose n*r*V logits exist at once (default: what fits in 1 GiB)"
    )
    checkpoint_circuit: bool = Field(False, description="recompute the circuit in the backward pass also for one chunk")
    learning_rate: float = Field(3e-4, gt=0, description="peak learning rate of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    schedule: Literal["constant", "cosine"] = Field("cosine", description="after the warm-up")
    warmup_steps: int = Field(30, ge=0, description="steps of linear warm-up, a quarter of the steps at most")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    precision: Literal["float32", "bf16"] = Field("float32", description="bf16: autocast of the head's products")
    seed: int = Field(0, ge=0, description="the run repeats with it")

    # the data path
    seq_len: int | None = Field(
        None, ge=4, description="tokens of a packed row (default: 1,024, or what the target reads where that is less)"
    )
    cache: Path | None = Field(None, description="folder of hidden states on disk; written if it is not there")
    block_rows: int | None = Field(None, ge=1, description="rows whose windows are shuffled together (default: 1 GiB)")
    regenerate: int = Field(0, ge=0, description="train on this many responses that vLLM writes first; 0: on the data")
    regenerate_prompt_tokens: int = Field(32, ge=1, description="tokens of a prompt cut from text")
    regenerate_crops: int = Field(8, ge=0, description="prompts cut from random places of each text; 0: its beginning")
    regenerate_tokens: int = Field(128, ge=1, description="tokens of a response")
    regenerate_greedy_share: float = Field(0.2, ge=0, le=1, description="share of the responses at temperature 0")
    regenerate_memory: int | None = Field(
        None, ge=1, description="bytes of vLLM's KV cache (default: its own; CPU: 1 GiB)"
    )
    target_dtype: str = Field("auto", description="auto, float32, bfloat16 or float16")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    attention: Literal["auto", "torch", "xformers"] = Field("auto", description="attention over packed rows")

    # where it runs
    parallel: Literal["ddp", "fsdp"] = Field("ddp", description="with several processes (torchrun, Ray)")
    ray_workers: int = Field(0, ge=0, description="run on Ray Train with this many workers; 0: in this process")

    # what is written
    save_minutes: float = Field(10.0, ge=0, description="between trainer states; the last one is kept")
    resume: bool = Field(False, description="go on from the trainer state in the out folder")
    log_every: int = Field(10, ge=1, description="steps between lines of metrics.jsonl")
    track: Literal["none", "tensorboard", "wandb"] = Field("none", description="also log there")
    evaluation_sequences: int = Field(64, ge=0, description="held-out continuations the figures come from; 0: none")
    evaluation_prompt_tokens: int = Field(32, ge=1, description="tokens of a held-out prompt cut from text")
    evaluation_tokens: int = Field(96, ge=1, description="tokens of each")
    num_speculative_tokens: int | None = Field(None, ge=1, description="drafts per step when served (default: n - 1)")
    verifier: str | None = Field(
        None, description="how the head names its target (default: relative path, or the name)"
    )
    dtype: Literal["float16", "bfloat16", "float32"] = Field("float16", description="of the weights on disk")
    dry_run: bool = Field(False, description="write the untrained head and stop")

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, values: Any) -> Any:
        is_ptp = isinstance(values, dict) and values.get("head") == "ptp"
        return PTP_DEFAULTS | values if is_ptp else values

    @model_validator(mode="after")
    def _consistent(self) -> TrainOptions:
        self._check_kind()
        self._check_used()
        if self.is_ptp:
            self._check_ptp()
            return self
        from vllm_mtpc.circuits import get_circuit
        from vllm_mtpc.heads import check_head_name

        get_circuit(self.circuit, self.window, self.num_components)
        check_head_name(self.head, "ptp")
        if self.beta == 0 and (self.kl, self.kl_form) != ("forward", "full"):
            raise ValueError("kl and kl_form say which KL, but beta is 0: give it a share, e.g. beta: 0.5")
        if self.lora_layers and self.cache:
            raise ValueError("cache holds the target's last states, draft layers need earlier ones: leave out cache")
        return self

    def _check_kind(self) -> None:
        """Raises ValueError for an option of the other kind of head."""
        if name := self._given(*(CIRCUIT_OPTIONS if self.is_ptp else PTP_OPTIONS)):
            kind, wanted = ("circuits", "another head") if self.is_ptp else ("PTP heads", "head ptp")
            loss = "; a circuit's loss is what beta and acceptance say" if name == "ptp_loss" else ""
            raise ValueError(f"{name} is an option of {kind}: remove {name}, or set {wanted}{loss}")

    def _check_used(self) -> None:
        """Raises ValueError for an option that another one leaves without effect."""
        if not self.is_ptp and not self.lora_layers and (name := self._given("lora_rank", "lora_alpha")):
            raise ValueError(f"{name} is of draft layers: remove {name}, or set lora_layers to 1, 2 or 4")
        if self.init_from and self._given("init"):
            raise ValueError(f"init={self.init!r} beside init_from, whose weights the head starts with: remove one")
        if self.validation_data and self._given("validation_share"):
            raise ValueError("validation_share beside validation_data, which is all that is held out: remove one")
        if not self.regenerate and (name := self._given(*REGENERATE_OPTIONS)):
            raise ValueError(f"{name} without regenerate: remove {name}, or set regenerate to a number of responses")
        names = [*self.data, *self.validation_data]
        if self._given("split") and all(is_path(name) and not Path(name).expanduser().is_dir() for name in names):
            raise ValueError(
                f"split={self.split!r} is of names of the datasets library, and data are files: remove split, or name "
                "the files of that split"
            )

    def _given(self, *names: str) -> str | None:
        """The first of the options that was given another value than its default."""
        fields = type(self).model_fields
        changed = (n for n in names if n in self.model_fields_set and getattr(self, n) != fields[n].default)
        return next(changed, None)

    def _check_ptp(self) -> None:
        from vllm_mtpc.heads.ptp.embedding import check_embedding, default_options

        options = default_options(self.u_embedding, self.u_hidden or 1)
        given = {"u_features": self.u_features, "u_hidden": self.u_hidden}
        options |= {key: value for key, value in given.items() if value is not None}
        check_embedding(self.u_embedding, options.get("u_features"), options.get("u_hidden"))
        if self.late_only and not (self.late_width and self.init_from):
            raise ValueError(
                "late_only trains the late network of a head that is trained already: set late_width, for example to "
                "256, and init_from to that head, or remove late_only"
            )
        if self.loss_name not in PTP_LOSSES[self.variant]:
            raise ValueError(
                f"ptp_loss {self.ptp_loss!r} with variant {self.variant!r}: allowed are "
                f"{', '.join(PTP_LOSSES[self.variant])}; set ptp_loss to one of them"
            )
        if (self.variant, self.loss_name) == ("o-ptp", "kl") and self.informed and self.law_trust is None:
            raise ValueError(
                "ptp_loss kl teaches rows laws, of which an o-ptp head drafts the likeliest token whatever u is: set "
                "law_trust, for example to 0.87, or informed to false for the baseline"
            )

    @property
    def is_ptp(self) -> bool:
        """Whether the head is a PTP head, not a circuit."""
        return self.head == "ptp"

    @property
    def kind(self) -> str:
        """What is trained, in a word."""
        return self.variant if self.is_ptp else self.circuit

    @property
    def loss_name(self) -> str:
        """The loss of a PTP head, with its default."""
        return self.ptp_loss or PTP_LOSSES[self.variant][0]

    @property
    def loss_unit(self) -> str:
        """What the loss counts, for the axis of a plot."""
        form = {"tv": "total variation", "length": "-accepted / (n - 1)", "log": "nats"}[self.acceptance_form]
        if self.is_ptp or not self.acceptance or form == "nats":
            return "nats per token"
        return form if self.acceptance == 1 else f"{100 * self.acceptance:g} % {form}, the rest nats"

    @property
    def num_components(self) -> int:
        """r, with its default."""
        from vllm_mtpc.circuits import circuit_class

        return self.components or min(32, circuit_class(self.circuit).max_components)

    @property
    def needs_law(self) -> bool:
        """Whether the loss reads the target's law over the vocabulary, not just the text."""
        return self.beta > 0 or self.acceptance > 0


def parse(values: dict[str, Any], source: str = "options") -> TrainOptions:
    """Validated options; raises UsageError, one line."""
    try:
        return TrainOptions.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"{source}: {one_line(error, TrainOptions)}") from None


def read_yaml(file: Path) -> dict[str, Any]:
    """The keys of a YAML file; raises UsageError."""
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{file}: cannot be read as YAML ({reason}); correct the file") from None
    if not isinstance(values, dict):
        raise UsageError(f"{file}: holds {type(values).__name__}; expected are lines 'option: value'")
    return values
