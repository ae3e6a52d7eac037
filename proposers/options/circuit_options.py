"""`speculative_config` of method mtpc: its options, their checks, and vLLM's config object made from them.

A head that cannot be served is refused here with a ServeConfigError of one line, before a worker starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, SkipValidation, ValidationError
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from vllm_mtpc.checkpoint import check_tensors, find_head, read_config, resolve_head
from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import ServeConfigError, first_line, one_line
from vllm_mtpc.heads import HEADS
from vllm_mtpc.plan.draft_schedule import KEY, LARGEST, Schedule, draft_arms, gpu_schedule, relative_load
from vllm_mtpc.proposers.options.engine_checks import check_draft_layers, check_structured_outputs, how_to_v2
from vllm_mtpc.proposers.options.versions import vllm_version

if TYPE_CHECKING:
    from typing import Self

COMMON_KEYS = ("method", "model", "revision", "num_speculative_tokens", KEY)  # options of every method
REJECTION_METHODS = ("standard", "block", "synthetic")  # vLLM 0.33's "fly" keeps drafts that must be rejected

# Targets of LoRA draft layers: `model.layers` of (positions, states, residual), `model.norm`, auxiliary hidden states
DRAFT_LAYER_TARGETS = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
    *("Qwen3ForCausalLM", "EvaByteForCausalLM", "TPULlamaForCausalLM"),
)
# vLLM's classes of these targets return the states before the final norm; a test compares the list with its sources
BEFORE_NORM = (
    *("MiMoForCausalLM", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    *("Step5ForCausalLM", "Step5ForConditionalGeneration", "KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"),
)


@config
class MtpcSpeculativeConfig(SpeculativeConfig):
    """vLLM's SpeculativeConfig for a circuit head, whose draft ModelConfig is the target's own.

    Attributes:
        head: the validated `config.json` of the folder `model`.
        head_dtype: dtype of the head's weights. auto: the target's, and bfloat16 on CPUs that multiply it.
        min_acceptance: least cumulative confidence of a verified draft on Model Runner V1; switches the plan off.
        mask_drafts: whether drafts of structured requests are masked with their grammar.
        verify: how drafted tokens are verified. None: requests with a seed by coupling, others by rejection.
        model_folder: `model`; Model Runner V1 needs `model` for another value while it starts.
        own_schedule: the schedule of dense data-parallel engines, until vLLM has made their configuration.
        hosted: vLLM's config of the drafter whose states the head reads; None: the head has none.
    """

    # All other options of vLLM's SpeculativeConfig belong to other methods and are refused.
    user_keys: ClassVar[tuple[str, ...]] = (
        *COMMON_KEYS,
        *("min_acceptance", "mask_drafts", "enable_adaptive_verification", "draft_sample_method", "head_dtype"),
        *("verify", "rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length"),
    )
    has_distribution: ClassVar[bool] = True  # drafts are sampled from q(x), which the rejection sampler receives

    method: Literal["mtpc"] | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    head: SkipValidation[HeadConfig] = None  # type: ignore[assignment]
    head_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    min_acceptance: float | None = Field(default=None, ge=0, lt=1)
    mask_drafts: bool = True
    verify: Literal["coupled", "rejection"] | None = None
    model_folder: str = ""
    has_default_schedule: bool = False
    own_schedule: SkipValidation[Schedule | None] = None
    hosted: SkipValidation[SpeculativeConfig | None] = None

    def __post_init__(self) -> None:  # the parent's accepts a closed list of methods
        self.prompt_lookup_max = self.prompt_lookup_min = 0
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config
        self.draft_tensor_parallel_size = self.target_parallel_config.tensor_parallel_size

    def __repr__(self) -> str:
        shown = ("method", "model", "num_speculative_tokens", KEY)
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def compute_hash(self) -> str:
        """Return the cache key of compiled targets; their graph returns the states of `aux_layers`."""
        return f"{SpeculativeConfig.compute_hash(self)}-{self.aux_layers}-{self.reads_aux}"

    @classmethod
    def create(cls, *, target_model_config: ModelConfig, target_parallel_config: ParallelConfig, **given: Any) -> Self:
        """Return the validated config for a user's `speculative_config`; options that are None are ignored.

        Raises:
            MtpcError: ServeConfigError, CheckpointError or HeadConfigError, each of one line.
        """
        target, parallel = target_model_config, target_parallel_config
        given = {key: value for key, value in given.items() if value is not None}
        check_options(given, cls.user_keys)
        folder = _find_head_folder(given, target)
        head = read_config(folder)
        check_head(folder, head, given, target)
        check_tensors(folder, head)
        given |= {"model": str(folder), "model_folder": str(folder), "head": head}
        given.setdefault("draft_sample_method", getattr(head, "draft_sample_method", "greedy"))
        drafts = given.setdefault("num_speculative_tokens", head.num_speculative_tokens)
        if not (needs_default := KEY not in given):
            given[KEY] = parse_schedule(given[KEY], drafts)
        try:
            made = cls(**given, target_model_config=target, target_parallel_config=parallel)
        except ValidationError as error:
            raise ServeConfigError(f"speculative_config: {one_line(error, list(cls.user_keys))}") from None
        if getattr(head, "drafter", None) is not None:  # a field of circuit heads alone
            made.hosted = configure_drafter(made)
        made.check_target()
        # no default where data-parallel ranks step together, and none for a prescribed acceptance
        is_synthetic = made.rejection_sample_method == "synthetic"
        steps_together = parallel.data_parallel_size > 1 and target.is_moe
        if needs_default and not steps_together and not is_synthetic:
            made.num_speculative_tokens_per_batch_size = made.default_schedule()
            made.has_default_schedule = True
        if parallel.data_parallel_size > 1 and not steps_together:  # vLLM refuses a schedule with data parallelism
            made.own_schedule = made.num_speculative_tokens_per_batch_size
            made.num_speculative_tokens_per_batch_size = None
        if is_synthetic:
            made.min_acceptance, made.verify = made.min_acceptance or 0.0, "rejection"
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
    def is_planned(self) -> bool:
        return self.has_default_schedule and self.min_acceptance is None

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
        if count := getattr(self.head, "lora_layers", 0):  # a field of circuit heads alone
            return [self.target_model_config.hf_text_config.num_hidden_layers - count]
        if self.hosted:
            return list(get_eagle3_aux_layers_from_config(self.hosted) or [])
        return list(getattr(self.head, "aux_hidden_state_layer_ids", None) or [])

    @property
    def reads_aux(self) -> bool:
        """Whether the target returns states of its layers, of `aux_layers` or those that a drafter has by default."""
        return bool(self.aux_layers) or (self.hosted is not None and self.hosted.method != "mtp")

    @property
    def has_backbone(self) -> bool:
        return getattr(self.head, "head", None) == "backbone"

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

    def check_target(self) -> None:
        """Raise ServeConfigError for a target or layout that heads of this method are not served on."""
        head, target, name = self.head, self.target_model_config, self.target_model_config.model
        subject, ours = f"speculative_config: head {self.model} has", head.transformer_layer_config
        ours, depth = ours.get("num_hidden_layers"), getattr(target.hf_text_config, "num_hidden_layers", None)
        if head.lora_layers and target.architecture not in DRAFT_LAYER_TARGETS:
            raise ServeConfigError(
                f"{subject} lora_layers={head.lora_layers}, and target {name} is {target.architecture}: allowed are "
                f"{', '.join(DRAFT_LAYER_TARGETS)}; use a head trained with lora_layers 0"
            )
        if head.lora_layers and ours not in (None, depth):
            reason = f"draft layers of a target with {ours} layers, but {name} has {depth}"
            raise ServeConfigError(f"{subject} {reason}; use a head trained for this target")
        if not self.hosted:  # vLLM gives a hosted drafter the states that it needs
            check_final_norm(self)
        if self.has_backbone:
            self._check_backbone(f"{subject} a backbone:")

    def _check_backbone(self, subject: str) -> None:
        head, target, ranks = self.head, self.target_model_config, self.target_parallel_config.tensor_parallel_size
        depth, last, name = target.get_total_num_hidden_layers(), max(self.aux_layers), target.model
        sizes = {size: getattr(head, size) for size in ("backbone_heads", "backbone_kv_heads", "backbone_width")}
        if ranks % head.backbone_kv_heads == 0:  # ranks share key and value heads
            del sizes["backbone_kv_heads"]
        uneven = ", ".join(f"{option}={size}" for option, size in sizes.items() if size % ranks)
        other = "use a head of another kind"
        if target.use_mla:
            raise ServeConfigError(f"{subject} target {name} keeps compressed keys and values (MLA); {other}")
        if target.uses_mrope:
            raise ServeConfigError(f"{subject} target {name} has several positions per token; {other}")
        if not _target_class_has(target, "set_aux_hidden_state_layers"):
            reason = "does not return the states of its layers (vLLM: SupportsEagle3)"
            raise ServeConfigError(f"{subject} target {name} {reason}; {other}")
        if last > depth:
            reason = f"reads layer {last}, but target {name} has {depth}; use a head of this target"
            raise ServeConfigError(f"{subject} {reason}")
        if self.head_dtype != "auto":
            reason = f"allowed head_dtype: auto; given: {self.head_dtype}; remove head_dtype"
            raise ServeConfigError(f"{subject} {reason}")
        if uneven:
            reason = f"with {uneven}, which tensor_parallel_size={ranks} does not divide; lower it"
            raise ServeConfigError(f"{subject} {reason}")

    def check_engine(self, vllm_config: Any) -> None:
        """Raise ServeConfigError for an engine this head is not served with; make V1's scheduling synchronous."""
        is_v2, kind, rule = vllm_config.use_v2_model_runner, self.head.head, self.rejection_sample_method
        stages, scheduler = vllm_config.parallel_config.pipeline_parallel_size, vllm_config.scheduler_config
        if stages > 1 and not (is_v2 and scheduler.async_scheduling):
            raise ServeConfigError(
                f"pipeline_parallel_size={stages} with drafts: allowed: Model Runner V2 with asynchronous scheduling; "
                f"{'drop --no-async-scheduling' if is_v2 else how_to_v2()}, or use tensor parallelism"
            )
        check_structured_outputs(vllm_config)
        if self.aux_layers or self.hosted:
            check_draft_layers(vllm_config)
        if vllm_config.lora_config is not None and HEADS[kind].needs_lm_head:
            raise ServeConfigError(
                f"enable_lora with a head of kind {kind!r}: the LoRA layer of an lm_head takes one row per request; "
                "allowed: heads of kind 'linear'; drop one of them"
            )
        if is_v2 and self.min_acceptance:
            remedy = "allowed: 0; drop it, or type enable_adaptive_verification: true"
            raise ServeConfigError(f"min_acceptance={self.min_acceptance} on Model Runner V2: {remedy}")
        if is_v2:
            return
        has_rule = rule == "block" or (rule == "synthetic" and current_platform.is_cpu())  # V1 verifies token by token
        if has_rule or self.verify == "coupled":  # unseeded noise cannot be drawn again
            given, allowed = (f"rejection_sample_method {rule!r}", "standard") if has_rule else ("verify", "rejection")
            raise ServeConfigError(f"{given} on Model Runner V1: allowed: {allowed!r}; drop it, or {how_to_v2()}")
        scheduler.async_scheduling = False  # V1 drafts from token lists on the host
        if self.has_default_schedule:  # K of any batch size
            self.num_speculative_tokens_per_batch_size = None


def configure_drafter(made: MtpcSpeculativeConfig) -> SpeculativeConfig:
    """Return vLLM's config of the drafter that the head of `made` names; raise ServeConfigError where it has none."""
    drafter = made.head.drafter
    assert drafter is not None
    options = drafter.serving(Path(made.model_folder), made.head.window - 1 if drafter.has_block else 1)
    targets = {name: getattr(made, name) for name in ("target_model_config", "target_parallel_config")}
    try:
        return SpeculativeConfig(**options, **targets)
    except Exception as error:  # vLLM and transformers raise many types
        reason = one_line(error, []) if isinstance(error, ValidationError) else first_line(error)
        whose = f"drafter {drafter.method} of {options.get('model', 'the target')}"
        raise ServeConfigError(
            f"speculative_config: head {made.model} reads {whose}, which vLLM {vllm_version()} refuses ({reason}); use "
            "a head of another kind"
        ) from None


def check_options(given: dict[str, Any], allowed: tuple[str, ...]) -> None:
    """Raise ServeConfigError for unknown or conflicting options of a `speculative_config`."""
    rule, subject = given.get("rejection_sample_method", "standard"), "speculative_config:"
    if unknown := next((key for key in given if key not in allowed), None):
        remedy = f"allowed: {', '.join(allowed)}; remove it"
        raise ServeConfigError(f"{subject} {unknown!r} is not an option of method {given['method']!r}; {remedy}")
    if rule not in REJECTION_METHODS:
        reason = f"does not keep the distribution or is not known; allowed: {', '.join(REJECTION_METHODS)}; drop it"
        raise ServeConfigError(f"{subject} rejection_sample_method={rule!r} {reason}")
    if rule != "standard" and given.get("verify") == "coupled":
        reason = "with verify='coupled', which rejects nothing; allowed: 'standard'; drop one of them"
        raise ServeConfigError(f"{subject} rejection_sample_method={rule!r} {reason}")


def check_head(folder: Path, head: AnyHeadConfig, given: Mapping[str, Any], target: ModelConfig) -> None:
    """Raise ServeConfigError for a head of another method or target, a recurrent target, or too many drafts."""
    method, asked, name, size = head.speculators_model_type, given["method"], target.model, head.hidden_size
    ours, start = f"head {folder}", "speculative_config:"
    if method != asked:
        raise ServeConfigError(f'{start} {ours} is of method {method!r}, not {asked!r}; type {{"method": "{method}"}}')
    for field, wanted in (("vocab_size", target.get_vocab_size()), ("hidden_size", target.get_hidden_size())):
        if (own := getattr(head, field)) != wanted:
            raise ServeConfigError(
                f"{start} {ours} has {field}={own}, but target {name} has {wanted}; use a head trained for this target "
                f"(this one was trained for {head.speculators_config.verifier.name_or_path})"
            )
    if target.is_hybrid or target.is_attention_free:
        reason = (
            f"which has recurrent layers: drafts of any method change the text of vLLM {vllm_version()} there on CPUs, "
            "and GPUs were not tried; allowed are attention layers alone; drop speculative_config"
        )
        raise ServeConfigError(f"{start} target {name} is {target.architecture}, {reason}")
    copies = getattr(target.hf_config, "hc_mult", 1)  # as vLLM's speculators find out
    if copies > 1 and _target_class_has(target, "get_mtp_target_hidden_states"):
        reason = f"{ours} reads hidden_size={size}; drop speculative_config"
        raise ServeConfigError(f"{start} target {name} returns hidden states of {copies} x {size} numbers, {reason}")
    drafts, most = given.get("num_speculative_tokens"), head.window - 1
    if drafts is not None and not (isinstance(drafts, int) and 1 <= drafts <= most):
        reason = f"{ours} has window={head.window}: allowed are 1 to {most}; lower it or leave it out"
        raise ServeConfigError(f"{start} num_speculative_tokens={drafts}; {reason}")


def parse_schedule(given: Any, num_drafts: int) -> Schedule | None:
    """Return the user's drafts by batch size, validated; None for "off" and false.

    Raises:
        ServeConfigError: it is not a list of [smallest batch, largest batch, drafts] from batch size 1 on.
    """
    if given is False or given == "off":
        return None
    from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

    try:
        ranges = validate_and_normalize_dynamic_sd_schedule(given)
        if (most := max(drafts for *_, drafts in ranges)) > num_drafts:
            raise ValueError(f"{most} drafts are more than num_speculative_tokens")
        return ranges
    except (TypeError, ValueError) as error:
        raise ServeConfigError(
            f"speculative_config: {KEY}={given!r}: {str(error).rstrip('.')}; allowed are [[smallest batch, largest "
            f'batch, drafts], ...] from batch 1 on with 0 to {num_drafts} drafts, or "off"; type e.g. '
            f"[[1, 8, {num_drafts}], [9, 9, 0]]"
        ) from None


def check_final_norm(spec: MtpcSpeculativeConfig) -> None:
    """Raise ServeConfigError for a target whose hidden states come before its final norm."""
    target = spec.target_model_config
    if target.architecture in BEFORE_NORM:
        raise ServeConfigError(
            f"speculative_config: target {target.model} is {target.architecture}, which returns hidden states from "
            "before its final norm: allowed are other targets; drop the head, or serve the target's own MTP layers: "
            '{"method": "mtp", "num_speculative_tokens": 1}'
        )


def _target_class_has(target: ModelConfig, method: str) -> bool:
    from vllm.model_executor.model_loader.utils import get_model_cls

    return hasattr(get_model_cls(target), method)


def _find_head_folder(given: dict[str, Any], target: ModelConfig) -> Path:
    if "model" in given:
        return resolve_head(str(given["model"]), given.get("revision"))
    place = target.model
    if not Path(place).is_dir():
        from huggingface_hub import snapshot_download

        with suppress(Exception):  # offline, private or absent: `find_head` then finds no folder
            place = snapshot_download(place, revision=target.revision, allow_patterns=["mtpc/*"])
    if bundled := find_head(place):
        return bundled
    remedy = 'name one: {"method": "mtpc", "model": "HEAD_FOLDER"}'
    raise ServeConfigError(f"speculative_config: no 'model', and {target.model} bundles no head in mtpc/; {remedy}")
