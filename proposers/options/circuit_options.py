"""`speculative_config` of method mtpc: its options, and vLLM's config object made from them.

A head that cannot be served is refused here with a ServeConfigError of one line, before a worker starts (refusals.py).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import SkipValidation, ValidationError
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from vllm_mtpc.checkpoint import check_tensors, find_head, read_config, resolve_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import ServeConfigError, first_line, one_line
from vllm_mtpc.plan.draft_schedule import LARGEST, SCHEDULE_KEY, Schedule, draft_arms, gpu_schedule, relative_load
from vllm_mtpc.proposers.options import refusals
from vllm_mtpc.proposers.options.refusals import refuse
from vllm_mtpc.proposers.options.versions import vllm_version

if TYPE_CHECKING:
    from typing import Self

COMMON_KEYS = ("method", "model", "revision", "num_speculative_tokens", SCHEDULE_KEY)  # options of every method


@config
class MtpcSpeculativeConfig(SpeculativeConfig):
    """vLLM's SpeculativeConfig for a circuit head, whose draft ModelConfig is the target's own.

    Attributes:
        head: the validated `config.json` of the folder `model`.
        head_dtype: dtype of the head's weights. auto: the target's, and bfloat16 on CPUs that multiply it.
        mask_drafts: whether drafts of structured requests are masked with their grammar.
        verify: how drafted tokens are verified. None: requests with a seed by coupling, others by rejection.
        model_folder: `model`; Model Runner V1 needs `model` for another value while it starts.
        is_planned: whether the online plan chooses K; it starts from the default schedule.
        own_schedule: the schedule of dense data-parallel engines, until vLLM has made their configuration.
        hosted: vLLM's config of the drafter whose states the head reads; None: the head has none.
    """

    # All other options of vLLM's SpeculativeConfig belong to other methods and are refused.
    user_keys: ClassVar[tuple[str, ...]] = (
        *COMMON_KEYS,
        *("mask_drafts", "enable_adaptive_verification", "draft_sample_method", "head_dtype"),
        *("verify", "rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length"),
    )
    has_distribution: ClassVar[bool] = True  # drafts are sampled from q(x), which the rejection sampler receives

    method: Literal["mtpc"] | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    head: SkipValidation[HeadConfig] = None  # type: ignore[assignment]
    head_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    mask_drafts: bool = True
    verify: Literal["coupled", "rejection"] | None = None
    # vLLM 0.33's "fly" keeps drafts that must be rejected
    rejection_sample_method: Literal["standard", "block", "synthetic"] = "standard"
    model_folder: str = ""
    is_planned: bool = False
    own_schedule: SkipValidation[Schedule | None] = None
    hosted: SkipValidation[SpeculativeConfig | None] = None

    def __post_init__(self) -> None:  # the parent's accepts a closed list of methods
        self.prompt_lookup_max = self.prompt_lookup_min = 0
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config
        self.draft_tensor_parallel_size = self.target_parallel_config.tensor_parallel_size

    def __repr__(self) -> str:
        shown = ("method", "model", "num_speculative_tokens", SCHEDULE_KEY)
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def compute_hash(self) -> str:
        """Return the cache key of compiled targets; their graph returns the states of `aux_layers`."""
        return f"{SpeculativeConfig.compute_hash(self)}-{self.aux_layers}-{self.reads_aux}"

    @classmethod
    def create(
        cls, *, target_model_config: ModelConfig, target_parallel_config: ParallelConfig, **options: Any
    ) -> Self:
        """Return the validated config for a user's `speculative_config`; options that are None are ignored.

        Raises:
            MtpcError: ServeConfigError, CheckpointError or HeadConfigError, each of one line.
        """
        target, parallel = target_model_config, target_parallel_config
        options = {key: value for key, value in options.items() if value is not None}
        subject, method, allowed = "speculative_config: ", options["method"], ", ".join(cls.user_keys)
        unknown = (key for key in options if key not in cls.user_keys)
        refuse(((True, f"{key!r} with method {method!r}", allowed, "remove it") for key in unknown), subject)
        folder = _find_head_folder(options, target)
        head, drafts = read_config(folder), options.get("num_speculative_tokens")
        refuse(refusals.head_rows(str(folder), head, method, drafts, target), subject)
        check_tensors(folder, head)
        options |= {"model": str(folder), "model_folder": str(folder), "head": head}
        options.setdefault("draft_sample_method", getattr(head, "draft_sample_method", "greedy"))
        drafts = options.setdefault("num_speculative_tokens", head.num_speculative_tokens)
        if not (needs_default := SCHEDULE_KEY not in options):
            options[SCHEDULE_KEY] = parse_schedule(options[SCHEDULE_KEY], drafts)
        try:
            made = cls(**options, target_model_config=target, target_parallel_config=parallel)
        except ValidationError as error:
            raise ServeConfigError(f"speculative_config: {one_line(error, list(cls.user_keys))}") from None
        if getattr(head, "hosted", None):  # of circuit heads alone
            made.hosted = configure_drafter(made)
        refuse(made.rows(), subject)
        # no default where data-parallel ranks step together, and none for a prescribed acceptance
        is_synthetic = made.rejection_sample_method == "synthetic"
        steps_together = parallel.data_parallel_size > 1 and target.is_moe
        if needs_default and not steps_together and not is_synthetic:
            made.num_speculative_tokens_per_batch_size = made.default_schedule()
            made.is_planned = True
        if parallel.data_parallel_size > 1 and not steps_together:  # vLLM refuses a schedule with data parallelism
            made.own_schedule = made.num_speculative_tokens_per_batch_size
            made.num_speculative_tokens_per_batch_size = None
        if is_synthetic:
            made.verify = "rejection"
        return made

    def restore_own_schedule(self) -> None:
        if self.own_schedule is not None:
            self.num_speculative_tokens_per_batch_size: Schedule | None = self.own_schedule
            self.own_schedule = None

    def default_schedule(self) -> Schedule:
        """Return the most drafts that the online plan chooses, by batch size."""
        most = self.num_speculative_tokens
        return [(1, LARGEST, most)] if current_platform.is_cpu() else gpu_schedule(most)

    @property
    def arms(self) -> tuple[int, ...]:
        """The K that the online plan chooses from at every batch size; none: it chooses those of the schedule."""
        return draft_arms(self.num_speculative_tokens) if self.is_planned and self.has_distribution else ()

    @property
    def load(self) -> float:
        return relative_load(self.head, self.target_model_config.hf_text_config)

    @property
    def aux_layers(self) -> list[int]:
        """Layers of the target whose input states the head's draft layers or backbone read."""
        if count := getattr(self.head, "lora_layers", 0):  # of circuit heads alone
            return [self.target_model_config.hf_text_config.num_hidden_layers - count]
        if self.hosted:
            return list(get_eagle3_aux_layers_from_config(self.hosted) or [])
        return self.head.trunk.aux_hidden_state_layer_ids if self.has_backbone else []

    @property
    def reads_aux(self) -> bool:
        """Whether the target returns states of its layers, of `aux_layers` or those that a drafter has by default."""
        return bool(self.aux_layers) or (self.hosted is not None and self.hosted.method != "mtp")

    @property
    def has_backbone(self) -> bool:
        return self.method == "mtpc" and self.head.trunk.kind == "backbone"

    @property
    def lookahead(self) -> int:
        """Most slots after a request's tokens that the queries of a backbone or drafter write."""
        return self.head.window if self.has_backbone or self.hosted else 0

    def use_eagle(self) -> bool:
        """Whether a token's keys and values depend on the next token, so that the last cached block is dropped."""
        return self.hosted is not None

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """Rows per request that the pass of a hosted drafter adds to those of the target."""
        return self.hosted.max_num_new_slots_for_drafting if self.hosted else 0

    def speculator(self) -> str:
        """Return the name of the speculator class in `vllm_mtpc.proposers.v2`."""
        if self.hosted:
            return "hosted.HostedSpeculator"
        if self.has_backbone:
            return "backbone_speculator.BackboneSpeculator"
        return "layered.LayeredSpeculator" if self.aux_layers else "speculator.MtpcSpeculator"

    def describe_drafts(self) -> str:
        drafts, ranges = self.num_speculative_tokens, self.num_speculative_tokens_per_batch_size
        if self.is_planned:
            return f"0 to {drafts} drafts per step, as measured costs and acceptance decide"
        if ranges is None:
            return f"{drafts} drafts per step, at any batch size"
        return f"drafts per step by running requests: {[list(entry) for entry in ranges]}"

    def reserved_blocks(self, vllm_config: Any, kv_cache_config: Any) -> int:
        """Return the number of KV blocks that requests do not get; raise ServeConfigError where too few remain."""
        return 0

    @property
    def second_pass(self) -> str:
        """The head's name in errors if it runs layers of its own over the target's KV cache, else empty."""
        return f"a head with trunk {self.head.trunk.kind!r}" if self.head.has_draft_layers else ""

    def rows(self) -> refusals.Rows:
        """Yield what heads of this method are not served with on the target."""
        return refusals.circuit_rows(self)

    def check_engine(self, vllm_config: Any) -> None:
        """Raise ServeConfigError for an engine this head is not served with; make V1's scheduling synchronous."""
        refuse(refusals.circuit_engine_rows(self, vllm_config))
        if not vllm_config.use_v2_model_runner:
            vllm_config.scheduler_config.async_scheduling = False  # V1 drafts from token lists on the host
            if self.is_planned:  # K of any batch size
                self.num_speculative_tokens_per_batch_size = None


def configure_drafter(made: MtpcSpeculativeConfig) -> SpeculativeConfig:
    """Return vLLM's config of the drafter that the head of `made` names; raise ServeConfigError where it has none."""
    drafter = made.head.hosted
    options = drafter.serving(Path(made.model_folder), made.head.window - 1 if drafter.has_block else 1)
    targets = {name: getattr(made, name) for name in ("target_model_config", "target_parallel_config")}
    try:
        return SpeculativeConfig(**options, **targets)
    except Exception as error:  # vLLM and transformers raise many types
        reason = one_line(error, []) if isinstance(error, ValidationError) else first_line(error)
        whose = f"drafter {drafter.method} of {options.get('model', 'the target')}"
        raise ServeConfigError(
            f"speculative_config: head {made.model} reads {whose}, which vLLM {vllm_version()} refuses ({reason}); use "
            "a head with another trunk"
        ) from None


def parse_schedule(value: Any, num_drafts: int) -> Schedule | None:
    """Return the user's drafts by batch size, validated; None for "off" and false. Raises ServeConfigError."""
    if value is False or value == "off":
        return None
    from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

    try:
        ranges = validate_and_normalize_dynamic_sd_schedule(value)
        if (most := max(drafts for *_, drafts in ranges)) > num_drafts:
            raise ValueError(f"{most} drafts are more than num_speculative_tokens")
        return ranges
    except (TypeError, ValueError) as error:
        raise ServeConfigError(
            f"speculative_config: {SCHEDULE_KEY}={value!r}: {str(error).rstrip('.')}; allowed are [[smallest batch, "
            f'largest batch, drafts], ...] from batch 1 on with 0 to {num_drafts} drafts, or "off"; type e.g. '
            f"[[1, 8, {num_drafts}], [9, 9, 0]]"
        ) from None


def _find_head_folder(options: dict[str, Any], target: ModelConfig) -> Path:
    if "model" in options:
        return resolve_head(str(options["model"]), options.get("revision"))
    place = target.model
    if not Path(place).is_dir():
        from huggingface_hub import snapshot_download

        with suppress(Exception):  # offline, private or absent: `find_head` then finds no folder
            place = snapshot_download(place, revision=target.revision, allow_patterns=["mtpc/*"])
    if bundled := find_head(place):
        return bundled
    remedy = 'name one: {"method": "mtpc", "model": "HEAD_FOLDER"}'
    raise ServeConfigError(f"speculative_config: no 'model', and {target.model} bundles no head in mtpc/; {remedy}")
