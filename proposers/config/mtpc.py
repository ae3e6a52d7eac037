"""`speculative_config` of method mtpc: its options, what they mean, and how it is made from what a user writes.

`ptp.py` derives from it; what neither is served with is in `refusals.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, SkipValidation, ValidationError
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.platforms import current_platform

from vllm_mtpc.checkpoint import check_tensors, find_head, read_config, resolve_head
from vllm_mtpc.checkpoint.inspect import measured_acceptance
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import ServeConfigError, one_line
from vllm_mtpc.heads.memory import by_batch, draft_memory
from vllm_mtpc.proposers.config import refusals, schedule
from vllm_mtpc.proposers.config.refusals import refuse

if TYPE_CHECKING:
    from typing import Self

# Of every family, in the `user_keys` of its class.
COMMON_KEYS = ("method", "model", "revision", "num_speculative_tokens", "num_speculative_tokens_per_batch_size")


@config
class MtpcSpeculativeConfig(SpeculativeConfig):
    """vLLM's SpeculativeConfig for a head. `head` is the validated config of the folder `model`.

    Differences from the parent: never runs its __post_init__ (which knows a closed list of methods),
    and describes the draft by the target's own ModelConfig, because a head has no layers of its own.
    """

    # What a user may write. Everything else in vLLM's SpeculativeConfig belongs to other methods, and an option that
    # would be ignored is refused instead.
    user_keys: ClassVar[tuple[str, ...]] = (
        *COMMON_KEYS,
        *("min_survival", "mask_drafts", "enable_adaptive_verification", "draft_sample_method", "head_dtype", "verify"),
        *("rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length"),
    )
    # What the log says of it: options, and fields of the head's config.
    shown: ClassVar[tuple[str, ...]] = (
        *("method", "model", "circuit", "window", "num_components", "num_speculative_tokens", "draft_sample_method"),
        *("head_dtype", "num_speculative_tokens_per_batch_size"),
    )
    has_distribution: ClassVar[bool] = True  # drafts come from one that the verifier scores

    method: Literal["mtpc"] | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    head: SkipValidation[HeadConfig] = None  # type: ignore[assignment]
    # Weights. auto: the target's dtype, on a CPU bfloat16 where it multiplies that
    head_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    # Model Runner V1: drafts less likely to be reached are not verified; 0: all are; None: as few or many as pay
    min_survival: float | None = Field(default=None, ge=0, lt=1)
    mask_drafts: bool = True  # structured requests' drafts are masked with their grammar
    # How a drafted token is verified; None: requests with a seed by coupling, others by rejection
    verify: Literal["coupled", "rejection"] | None = None
    model_folder: str = ""  # `model`, which the V1 runner needs for something else while it starts
    has_default_schedule: bool = False
    is_bundled: bool = (
        False  # the target bundles the head and nobody has named it: where it fails, the target is served
    )
    own_schedule: SkipValidation[schedule.Schedule | None] = None  # of dense data-parallel engines, until each has it

    def __post_init__(self) -> None:
        self.prompt_lookup_max = self.prompt_lookup_min = 0
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config
        self.draft_tensor_parallel_size = self.target_parallel_config.tensor_parallel_size

    def __repr__(self) -> str:
        known = vars(self.head) | vars(self)
        return f"{type(self).__name__}({', '.join(f'{name}={known[name]!r}' for name in self.shown)})"

    def compute_hash(self) -> str:
        """Key of compiled targets: with draft layers their graph hands out the states that enter some of its layers."""
        return f"{SpeculativeConfig.compute_hash(self)}-{self.aux_layers}"

    @classmethod
    def create(cls, *, target_model_config: ModelConfig, target_parallel_config: ParallelConfig, **given: Any) -> Self:
        """The validated config for a user's `speculative_config`; an option that is None is not given.

        Raises ServeConfigError, CheckpointError or HeadConfigError, each one line.
        """
        target, parallel = target_model_config, target_parallel_config
        given = {key: value for key, value in given.items() if value is not None}
        refuse(refusals.of_request(given, cls.user_keys))
        folder = _head_folder(given, target)
        head = read_config(folder)
        refuse(refusals.of_head(folder, head, given, target))
        check_tensors(folder, head)
        given.setdefault("draft_sample_method", getattr(head, "draft_sample_method", "greedy"))
        drafts = given.setdefault("num_speculative_tokens", head.num_speculative_tokens)
        wants_default = schedule.KEY not in given
        if not wants_default:
            given[schedule.KEY] = schedule.chosen(given[schedule.KEY], drafts)
        given |= {"model": str(folder), "model_folder": str(folder), "head": head}
        try:
            made = cls(**given, target_model_config=target, target_parallel_config=parallel)
        except ValidationError as error:
            raise ServeConfigError(f"speculative_config: {one_line(error, list(cls.user_keys))}") from None
        made.check_target()
        # no default where data-parallel ranks step together, or prescribed acceptance says nothing about drafts
        is_synthetic = made.rejection_sample_method == "synthetic"
        together = parallel.data_parallel_size > 1 and target.is_moe
        if wants_default and not together and not is_synthetic:
            made.num_speculative_tokens_per_batch_size = made.default_schedule()
            made.has_default_schedule = True
        if parallel.data_parallel_size > 1 and not together:  # vLLM drops it, though each engine runs by itself
            made.own_schedule = made.num_speculative_tokens_per_batch_size
            made.num_speculative_tokens_per_batch_size = None
        if is_synthetic:  # whatever the drafts are
            made.min_survival, made.verify = made.min_survival or 0.0, "rejection"
        return made

    def take_own_schedule(self) -> None:
        """Once vLLM has made the configuration: each of the dense data-parallel engines has the schedule to itself."""
        if self.own_schedule is not None:
            self.num_speculative_tokens_per_batch_size: schedule.Schedule | None = self.own_schedule
            self.own_schedule = None

    def default_schedule(self) -> schedule.Schedule:
        """Drafts by batch size where the user names none."""
        measured = measured_acceptance(Path(self.model_folder)).values()
        return schedule.default_schedule(measured, self.num_speculative_tokens, current_platform.is_cpu(), self.load)

    @property
    def load(self) -> float:
        """Multiplications of the head's leaves for one draft, by those of the target for one row."""
        return schedule.load_of(self.head, self.target_model_config.hf_text_config)

    @property
    def aux_layers(self) -> list[int]:
        """Layers of the target whose incoming states draft layers read: a backbone's, or LoRA's."""
        count = getattr(self.head, "lora_layers", 0)  # only MtPC heads have any
        ours = getattr(self.head, "aux_hidden_state_layer_ids", None) or []
        return [self.target_model_config.hf_text_config.num_hidden_layers - count] if count else list(ours)

    @property
    def lookahead(self) -> int:
        """KV slots behind a request's text that its drafts write to: a backbone's queries."""
        return self.head.window if self.has_backbone else 0

    @property
    def has_backbone(self) -> bool:
        return getattr(self.head, "head", None) == "backbone"

    def speculator(self) -> str:
        """The class that drafts on Model Runner V2, by its name in `vllm_mtpc.proposers.v2`."""
        if self.has_backbone:
            return "backbone_speculator.BackboneSpeculator"
        return "layered.LayeredSpeculator" if self.aux_layers else "speculator.MtpcSpeculator"

    def drafts_in_words(self, is_v2: bool) -> str:
        """How many drafts there will be, in a line."""
        is_planned = not is_v2 and self.min_survival is None
        ranges = None if is_planned else self.num_speculative_tokens_per_batch_size
        return schedule.in_words(ranges, self.num_speculative_tokens, is_planned)

    def device_bytes(self, vllm_config: Any) -> int:
        """What the head and its drafts take on each device, as far as that is known before a worker starts."""
        num_drafts, max_num_seqs = self.num_speculative_tokens, vllm_config.scheduler_config.max_num_seqs
        drafts = by_batch(self.num_speculative_tokens_per_batch_size, max_num_seqs, num_drafts)
        ranks, device = vllm_config.parallel_config.tensor_parallel_size, vllm_config.device_config.device_type
        is_drawn, dtype = self.draft_sample_method == "probabilistic", vllm_config.model_config.dtype
        return sum(draft_memory(self.head, drafts, num_drafts, dtype, ranks, device, is_drawn))

    def reserved_blocks(self, vllm_config: Any, kv_cache_config: Any) -> int:
        """KV blocks that are kept from requests; raises ServeConfigError where too few are left for one request."""
        return 0

    def check_target(self) -> None:
        """Refuse a target or layout that heads of this family are not served on."""
        refuse(refusals.of_mtpc_target(self))

    def check_engine(self, vllm_config: Any) -> None:
        """Refuse what a head cannot be served with on this runner; keep V1's scheduling synchronous."""
        refuse(refusals.of_mtpc_engine(self, vllm_config))
        if not vllm_config.use_v2_model_runner:
            vllm_config.scheduler_config.async_scheduling = False  # V1 drafts from token lists on the host
            if self.has_default_schedule and self.min_survival is None:  # the worker plans by what it observes
                self.num_speculative_tokens_per_batch_size = None


def weights_of(folder: Path) -> int:
    """Bytes of the safetensors in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _head_folder(given: dict[str, Any], target: ModelConfig) -> Path:
    """The head that is named, else the one that the target bundles."""
    if "model" in given:
        return resolve_head(str(given["model"]), given.get("revision"))
    place: str | None = target.model
    if not Path(target.model).is_dir():
        from huggingface_hub import snapshot_download

        try:
            place = snapshot_download(target.model, revision=target.revision, allow_patterns=["mtpc/*"])
        except Exception:  # offline, private or absent: all mean that no head can be had from there
            place = None
    bundled = find_head(place) if place else None
    if bundled is None:
        raise ServeConfigError(
            f"speculative_config: no 'model' given and {target.model} bundles no head in mtpc/; "
            'name one: {"method": "mtpc", "model": "HEAD_FOLDER"}'
        )
    return bundled
