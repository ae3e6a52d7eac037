"""`speculative_config` of method mtpc: its options, what they mean, and every engine it is not served on.

`ptp.py` derives from it; `create.py` makes either from what a user writes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, SkipValidation
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.platforms import current_platform

from vllm_mtpc.checkpoint.inspect import measured_acceptance
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.heads import needs_lm_head
from vllm_mtpc.heads.memory import by_batch, draft_memory
from vllm_mtpc.proposers.config import layers, schedule

# Weights of the head. auto: the target's, on a CPU bfloat16 where it multiplies that; fp8: its unembeddings in float8
HeadDtype = Literal["auto", "bfloat16", "float16", "float32", "fp8"]


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
    has_distribution: ClassVar[bool] = True  # drafts come from one that the verifier scores

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
        return f"{SpeculativeConfig.compute_hash(self)}-{self.draft_layers}"

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

    @property
    def draft_layers(self) -> int:
        """How many LoRA draft layers the head reads."""
        return self.head.lora_layers

    def speculator(self) -> str:
        """The class that drafts on Model Runner V2, by its name in `vllm_mtpc.proposers.v2`."""
        return "layered.LayeredSpeculator" if self.draft_layers else "speculator.MtpcSpeculator"

    def drafts_in_words(self, is_v2: bool) -> str:
        """How many drafts there will be, in a line."""
        is_planned = not is_v2 and self.min_survival is None
        ranges = None if is_planned else self.num_speculative_tokens_per_batch_size
        return schedule.in_words(ranges, self.num_speculative_tokens, is_planned)

    def device_bytes(self, vllm_config: Any) -> int:
        """What the head and its drafts take on each device, as far as that is known before a worker starts."""
        num_drafts, max_num_seqs = self.num_speculative_tokens, vllm_config.scheduler_config.max_num_seqs
        found = draft_memory(
            self.head,
            by_batch(self.num_speculative_tokens_per_batch_size, max_num_seqs, num_drafts),
            num_drafts,
            vllm_config.model_config.dtype,
            vllm_config.parallel_config.tensor_parallel_size,
            vllm_config.device_config.device_type,
            self.draft_sample_method == "probabilistic",
        )
        return sum(found)

    def reserved_blocks(self, vllm_config: Any, kv_cache_config: Any) -> int:
        """KV blocks that are kept from requests; raises ServeConfigError where too few are left for one request."""
        return 0

    @classmethod
    def check_target(cls, folder: Path, head: Any, target: ModelConfig, parallel: ParallelConfig) -> None:
        """Refuse a target or layout that the head is not served on."""
        if head.lora_layers:
            layers.check_target(folder, head, target)

    def check_adaptive(self, engine_args: Any) -> None:
        """Refuse vLLM's adaptive verification where it does not run, before vLLM does in other words."""
        if not self.enable_adaptive_verification:
            return
        mode = getattr(engine_args.compilation_config, "cudagraph_mode", None)
        lacking = {
            "a CPU": current_platform.is_cpu(),
            "VLLM_USE_V2_MODEL_RUNNER=0": os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0",
            "enforce_eager": engine_args.enforce_eager,
            "CUDA graphs without full ones": mode is not None and not mode.has_full_cudagraphs(),
            "enable_lora": engine_args.enable_lora,
            "pipeline_parallel_size above 1": engine_args.pipeline_parallel_size > 1,
        }
        for what, is_given in lacking.items():
            if is_given:
                raise ServeConfigError(
                    f"enable_adaptive_verification with {what}: vLLM needs Model Runner V2 on a GPU with full CUDA "
                    "graphs, no LoRA and one pipeline stage; drop either; on Model Runner V1 min_survival cuts drafts"
                )

    def check_engine(self, vllm_config: Any) -> None:
        """Refuse what a head cannot be served with on this runner; keep V1's scheduling synchronous."""
        is_v2, scheduler = vllm_config.use_v2_model_runner, vllm_config.scheduler_config
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1 and not (is_v2 and scheduler.async_scheduling):
            runner = "Model Runner V2 with synchronous scheduling" if is_v2 else "Model Runner V1"
            remedy = "drop --no-async-scheduling" if is_v2 else layers.how_to_v2()
            raise ServeConfigError(
                f"pipeline_parallel_size={stages} with drafts on {runner}: vLLM crashes there; allowed: Model Runner "
                f"V2 with asynchronous scheduling; {remedy}, or use tensor parallelism"
            )
        head = self.head
        if head.lora_layers:
            layers.check_engine(vllm_config)
        if vllm_config.lora_config is not None and needs_lm_head(head.head):
            raise ServeConfigError(
                f"enable_lora with a head of kind {head.head!r}: it reads the target's lm_head, whose LoRA layer takes "
                "one row per request; allowed: heads of kind 'linear', 'mlp', 'transformer'; drop enable_lora or the "
                "head"
            )
        if is_v2 and self.min_survival:
            raise ServeConfigError(
                f"min_survival={self.min_survival} on Model Runner V2: the host does not see drafts there; allowed: 0; "
                "drop it, or type enable_adaptive_verification: true"
            )
        if not is_v2 and self.verify == "coupled":
            raise ServeConfigError(
                "verify='coupled' on Model Runner V1, where requests without a seed have no noise that can be drawn "
                f"again; allowed: 'rejection'; drop it, or {layers.how_to_v2()}"
            )
        if not is_v2 and self.rejection_sample_method == "block":
            raise ServeConfigError(
                "rejection_sample_method 'block' on Model Runner V1, which verifies token by token: allowed are "
                "'standard' and 'synthetic'; drop it"
            )
        if not is_v2 and self.rejection_sample_method == "synthetic" and vllm_config.device_config.device_type == "cpu":
            raise ServeConfigError(
                "rejection_sample_method 'synthetic' on Model Runner V1 on a CPU: vLLM's kernels there do not have it; "
                "allowed: 'standard'; drop it, or use a GPU"
            )
        if not is_v2:
            scheduler.async_scheduling = False  # V1 drafts from token lists on the host
            if self.has_default_schedule and self.min_survival is None:  # the worker plans by what it observes
                self.num_speculative_tokens_per_batch_size = None


def weights_of(folder: Path) -> int:
    """Bytes of the safetensors in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
