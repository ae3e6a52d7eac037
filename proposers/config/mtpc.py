"""`speculative_config` of this package's methods: checked whole, in the caller's process, one line per error.

What only PTP heads have is in `config_ptp.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SkipValidation, ValidationError
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.platforms import current_platform

from vllm_mtpc.checkpoint import check_tensors, find_head, read_config, resolve_head
from vllm_mtpc.checkpoint.figures import measured_acceptance
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.config.ptp import PtpConfig
from vllm_mtpc.errors import ServeConfigError, did_you_mean, one_line
from vllm_mtpc.heads import needs_lm_head
from vllm_mtpc.proposers.config import layers as config_layers
from vllm_mtpc.proposers.config import schedule

# What a user may write. Everything else in vLLM's SpeculativeConfig belongs to other methods, and an
# option that would be ignored is refused instead.
USER_KEYS = (
    "method",
    "model",
    "revision",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "min_survival",
    "mask_drafts",
    "enable_adaptive_verification",
    "draft_sample_method",
    "head_dtype",
    "verify",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
)

REJECTION_METHODS = ("standard", "block", "synthetic")  # vLLM 0.33's "fly" keeps drafts that the target's law rejects

# Weights of the head. auto: the target's, on a CPU bfloat16 where it multiplies that; fp8: its unembeddings in float8
HeadDtype = Literal["auto", "bfloat16", "float16", "float32", "fp8"]


@config
class MtpcSpeculativeConfig(SpeculativeConfig):
    """vLLM's SpeculativeConfig for a head. `head` is the validated config of the folder `model`.

    Differences from the parent: never runs its __post_init__ (which knows a closed list of methods),
    and describes the draft by the target's own ModelConfig, because a head has no layers of its own.
    """

    method: Literal["mtpc"] | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    head: SkipValidation[HeadConfig] = None  # type: ignore[assignment]
    head_dtype: HeadDtype = "auto"
    # Model Runner V1: drafts less likely to be reached are not verified; 0: all are; None: as few or many as pay
    min_survival: float | None = Field(default=None, ge=0, lt=1)
    mask_drafts: bool = True  # structured requests' drafts are masked with their grammar
    # How a drafted token is verified; None: requests with a seed by coupling, others by rejection
    verify: Literal["coupled", "rejection"] | None = None
    model_folder: str = ""  # `model`, which the V1 runner needs for something else while it starts
    has_default_schedule: bool = False
    is_shipped: bool = False  # the target ships the head and nobody has named it: where it fails, the target is served
    own_schedule: SkipValidation[schedule.Schedule | None] = None  # of dense data-parallel engines, until each has it

    def __post_init__(self) -> None:
        self.prompt_lookup_max = self.prompt_lookup_min = 0
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config
        self.draft_tensor_parallel_size = self.target_parallel_config.tensor_parallel_size

    def __repr__(self) -> str:
        head = self.head
        return (
            f"MtpcSpeculativeConfig(method={self.method!r}, model={self.model!r}, circuit={head.circuit!r}, "
            f"window={head.window}, num_components={head.num_components}, "
            f"num_speculative_tokens={self.num_speculative_tokens}, draft_sample_method={self.draft_sample_method!r}, "
            f"head_dtype={self.head_dtype!r}, "
            f"num_speculative_tokens_per_batch_size={self.num_speculative_tokens_per_batch_size})"
        )

    def compute_hash(self) -> str:
        """Key of compiled targets: with draft layers their graph hands out the states that enter one of its layers."""
        return f"{SpeculativeConfig.compute_hash(self)}-{getattr(self.head, 'lora_layers', 0)}"

    def take_own_schedule(self) -> None:
        """Once vLLM has made the configuration: each of the dense data-parallel engines has the schedule to itself."""
        if self.own_schedule is not None:
            self.num_speculative_tokens_per_batch_size, self.own_schedule = self.own_schedule, None

    def default_schedule(self) -> schedule.Schedule:
        """Drafts by batch size where the user names none."""
        measured = measured_acceptance(Path(self.model_folder)).values()
        return schedule.default_schedule(measured, self.num_speculative_tokens, current_platform.is_cpu(), self.load)

    @property
    def load(self) -> float:
        """Multiplications of the head's leaves for one draft, by those of the target for one row."""
        return schedule.load_of(self.head, self.target_model_config.hf_text_config)


class HeadSchedulerConfig(SchedulerConfig):
    """vLLM's, whose scheduler is derived from the one it would choose: its field `scheduler_cls` warns, and names one
    class for both synchronous and asynchronous scheduling."""

    def get_scheduler_cls(self) -> type:
        from vllm_mtpc.proposers.seam.derive import derived
        from vllm_mtpc.proposers.seam.scheduler import HeadScheduler

        return derived(HeadScheduler, super().get_scheduler_cls())


def create(**given: Any) -> MtpcSpeculativeConfig:
    """The validated config for a user's `speculative_config` plus vLLM's target_* entries, of the method it names.

    Raises ServeConfigError, CheckpointError or HeadConfigError, each one line.
    """
    target: ModelConfig = given.pop("target_model_config")
    parallel: ParallelConfig = given.pop("target_parallel_config")
    given = {key: value for key, value in given.items() if value is not None}
    if given["method"] == "ptp":
        from vllm_mtpc.proposers.config import ptp as config_ptp

        config_class, user_keys = config_ptp.PtpSpeculativeConfig, config_ptp.USER_KEYS
    else:
        config_class, user_keys = MtpcSpeculativeConfig, USER_KEYS
    _check_request(given, user_keys)
    folder = _head_folder(given, target)
    head = read_config(folder)
    _check_method(folder, head, given["method"])
    _check_fit(folder, head, given, target)
    if isinstance(head, HeadConfig):
        given.setdefault("draft_sample_method", head.draft_sample_method)
        check_tensors(folder, head)
        if head.lora_layers:
            config_layers.check_target(folder, head, target)
    else:
        config_ptp.check_target(folder, head, target, parallel)
    drafts = given.setdefault("num_speculative_tokens", head.num_speculative_tokens)
    wants_default = schedule.KEY not in given
    if not wants_default:
        given[schedule.KEY] = schedule.chosen(given[schedule.KEY], drafts)
    try:
        made = config_class(
            **{**given, "model": str(folder), "model_folder": str(folder), "head": head},
            target_model_config=target,
            target_parallel_config=parallel,
        )
    except ValidationError as error:
        raise ServeConfigError(f"speculative_config: {one_line(error, list(user_keys))}") from None
    # no default where data-parallel ranks step together, or prescribed acceptance says nothing about drafts
    together = parallel.data_parallel_size > 1 and target.is_moe
    if wants_default and not together and made.rejection_sample_method != "synthetic":
        made.num_speculative_tokens_per_batch_size = made.default_schedule()
        made.has_default_schedule = True
    if parallel.data_parallel_size > 1 and not together:  # vLLM drops it, though each engine runs by itself
        made.own_schedule = made.num_speculative_tokens_per_batch_size
        made.num_speculative_tokens_per_batch_size = None
    if made.rejection_sample_method == "synthetic":  # whatever the drafts are
        if made.min_survival is None:
            made.min_survival = 0.0
        made.verify = "rejection"
    return made


def _check_request(given: dict[str, Any], user_keys: tuple[str, ...]) -> None:
    """What can be said without looking at the head."""
    unknown = [key for key in given if key not in user_keys]
    if unknown:
        raise ServeConfigError(
            f"speculative_config: {unknown[0]!r} is not an option of method {given['method']!r}; allowed: "
            f"{', '.join(user_keys)}; remove it{did_you_mean(unknown[0], user_keys)}"
        )
    if (rule := given.get("rejection_sample_method", "standard")) not in REJECTION_METHODS:
        raise ServeConfigError(
            f"speculative_config: rejection_sample_method={rule!r} does not keep the target's law or is not known; "
            f"allowed: {', '.join(REJECTION_METHODS)}; drop it"
        )
    if rule != "standard" and given.get("verify") == "coupled":
        raise ServeConfigError(
            f"speculative_config: rejection_sample_method={rule!r} with verify='coupled', which rejects nothing; "
            "allowed: 'standard'; drop one of them"
        )


def _head_folder(given: dict[str, Any], target: ModelConfig) -> Path:
    if "model" in given:
        folder = resolve_head(str(given["model"]), given.get("revision"))
        return find_head(folder) or folder  # a folder without a head is refused by name when it is read
    shipped = find_head(target.model) if Path(target.model).is_dir() else _shipped_on_hub(target)
    if shipped is None:
        raise ServeConfigError(
            f"speculative_config: no 'model' given and {target.model} ships no head in mtpc/; "
            'name one: {"method": "mtpc", "model": "HEAD_FOLDER"}'
        )
    return shipped


def _shipped_on_hub(target: ModelConfig) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(target.model, revision=target.revision, allow_patterns=["mtpc/*"])
    except Exception:  # offline, private or absent: all mean that no head can be had from there
        return None
    return find_head(folder)


def _check_method(folder: Path, head: HeadConfig | PtpConfig, method: str) -> None:
    """Refuse a head of the other family."""
    if head.speculators_model_type != method:
        raise ServeConfigError(
            f"speculative_config: head {folder} is of method {head.speculators_model_type!r}, not {method!r}; "
            f'type {{"method": "{head.speculators_model_type}"}}'
        )


def _check_fit(folder: Path, head: HeadConfig | PtpConfig, given: dict[str, Any], target: ModelConfig) -> None:
    """Refuse a head made for another target, and more drafts than its window holds."""
    sizes = (
        ("vocab_size", head.vocab_size, target.get_vocab_size()),
        ("hidden_size", head.hidden_size, target.get_hidden_size()),
    )
    for name, ours, theirs in sizes:
        if ours != theirs:
            raise ServeConfigError(
                f"speculative_config: head {folder} has {name}={ours}, but target {target.model} has {theirs}; "
                f"use a head trained for this target (this one was trained for "
                f"{head.speculators_config.verifier.name_or_path})"
            )
    if (copies := getattr(target.hf_config, "hc_mult", 1)) > 1:
        from vllm.model_executor.model_loader.utils import get_model_cls

        if hasattr(get_model_cls(target), "get_mtp_target_hidden_states"):  # as vLLM's speculators find out
            raise ServeConfigError(
                f"speculative_config: target {target.model} hands out hidden states of {copies} x {head.hidden_size} "
                f"numbers, the copies of its residual stream; head {folder} reads hidden_size={head.hidden_size}: "
                "allowed are targets that hand out what leaves their final norm; drop speculative_config"
            )
    if given.get("head_dtype") == "fp8" and needs_lm_head(head.head):
        raise ServeConfigError(
            f"speculative_config: head_dtype='fp8', but head {folder} (head={head.head!r}) has no unembeddings of its "
            "own to keep in float8; allowed: auto, bfloat16, float16, float32; remove head_dtype"
        )
    drafts = given.get("num_speculative_tokens")
    if drafts is not None and (not isinstance(drafts, int) or not 1 <= drafts <= head.window - 1):
        raise ServeConfigError(
            f"speculative_config: num_speculative_tokens={drafts}; head {folder} has window={head.window} and its "
            f"first token is the target's own, so allowed are 1 to {head.window - 1}; lower it or leave it out"
        )
