"""Patches that run where a model is: the two model runners, and two bugs of V1 sampling on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_mtpc import METHODS
from vllm_mtpc.proposers.seam import lora, watch
from vllm_mtpc.proposers.seam.patch import Patch, refuse_problems


def _is_ours(speculative_config: Any) -> bool:
    """By the method's name: a process that serves no head imports nothing here."""
    return getattr(speculative_config, "method", None) in METHODS


def draft_layers(speculative_config: Any) -> int:
    """How many LoRA draft layers a config's head reads; 0 for configs that are not ours."""
    return getattr(speculative_config.head, "lora_layers", 0) if _is_ours(speculative_config) else 0


def speculator_class(speculative_config: Any) -> type:
    """The Model Runner V2 speculator of one of our configs."""
    if draft_layers(speculative_config):
        from vllm_mtpc.proposers.v2.layered import LayeredSpeculator

        return LayeredSpeculator
    if speculative_config.method == "mtpc":
        from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator

        return MtpcSpeculator
    if speculative_config.draft_pass == "merged":
        from vllm_mtpc.proposers.v2.ptp.merged import MergedSpeculator

        return MergedSpeculator
    from vllm_mtpc.proposers.v2.ptp.speculator import PtpSpeculator

    return PtpSpeculator


class InitSpeculator(Patch):
    module = "vllm.v1.worker.gpu.model_runner"
    attribute = "init_speculator"
    reason = "build our speculator on Model Runner V2; vLLM's factory knows a closed list"
    parameters = ("vllm_config", "device")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def init_speculator(vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_ours(vllm_config.speculative_config):
                return original(vllm_config, device, *args, **kwargs)
            from vllm_mtpc.proposers.watch import watch_speculator

            refuse_problems()
            speculator = speculator_class(vllm_config.speculative_config)(vllm_config, device)
            watch_speculator(speculator)
            return speculator

        return init_speculator


class V2RunnerInit(Patch):
    module = "vllm.v1.worker.gpu.model_runner"
    attribute = "GPUModelRunner.__init__"
    reason = "let the target hand out the states that draft layers read; vLLM does so for a list of method names"
    parameters = ("self", "vllm_config", "device")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, *args, **kwargs)
            if draft_layers(vllm_config.speculative_config):
                self.use_aux_hidden_state_outputs = True

        return __init__


class V1RunnerInit(Patch):
    module = "vllm.v1.worker.gpu_model_runner"
    attribute = "GPUModelRunner.__init__"
    reason = "build our proposer on V1 through its offered `custom_class`, which it only looks at while it starts"
    parameters = ("self", "vllm_config", "device")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            spec = vllm_config.speculative_config
            if not _is_ours(spec):
                original(self, vllm_config, *args, **kwargs)
                return
            refuse_problems()
            ours = spec.method, spec.model
            # object.__setattr__: the config validates assignments, and "custom_class" is none of our methods
            object.__setattr__(spec, "method", "custom_class")
            object.__setattr__(spec, "model", "vllm_mtpc.proposers.v1.proposer.MtpcProposer")
            try:
                original(self, vllm_config, *args, **kwargs)
            finally:
                object.__setattr__(spec, "method", ours[0])
                object.__setattr__(spec, "model", ours[1])

        return __init__


class V1ProposeDraftTokenIds(Patch):
    module = "vllm.v1.worker.gpu_model_runner"
    attribute = "GPUModelRunner.propose_draft_token_ids"
    reason = "hand our V1 proposer the hidden states; `custom_class` proposers get none"
    parameters = ("self", "sampled_token_ids", "sampling_metadata", "sample_hidden_states", "spec_decode_metadata")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def propose_draft_token_ids(
            self: Any,
            scheduler_output: Any,
            sampled_token_ids: Any,
            sampling_metadata: Any,
            hidden_states: Any,
            sample_hidden_states: Any,
            aux_hidden_states: Any,
            spec_decode_metadata: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if _is_ours(self.speculative_config):
                return self.drafter.propose_drafts(
                    self,
                    sampled_token_ids,
                    sampling_metadata,
                    sample_hidden_states,
                    spec_decode_metadata,
                    scheduler_output,
                )
            return original(
                self,
                scheduler_output,
                sampled_token_ids,
                sampling_metadata,
                hidden_states,
                sample_hidden_states,
                aux_hidden_states,
                spec_decode_metadata,
                *args,
                **kwargs,
            )

        return propose_draft_token_ids


class V1InputFitsInDrafter(Patch):
    module = "vllm.v1.worker.gpu_model_runner"
    attribute = "GPUModelRunner._input_fits_in_drafter"
    reason = "draft up to the last token: a head has no length, and vLLM would give the whole batch zeros as drafts"
    parameters = ("self", "common_attn_metadata")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
            return _is_ours(self.speculative_config) or original(self, common_attn_metadata)

        return _input_fits_in_drafter


class ExpandBatchToTokens(Patch):
    module = "vllm.v1.sample.rejection_sampler"
    attribute = "expand_batch_to_tokens"
    reason = "vLLM's CPU kernel fills a copy of a float output, so V1 samples with uninitialised temperatures"
    parameters = ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        from vllm_mtpc.proposers.v1.expand import choose

        return choose(original)


class V1Sample(Patch):
    module = "vllm.v1.worker.gpu_model_runner"
    attribute = "GPUModelRunner._sample"
    reason = "sample a step without drafts as if nothing ever drafted: V1 verifies no rows, slowly, or raises (top-k)"
    parameters = ("self", "logits", "spec_decode_metadata")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
            is_verifying = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len > 0
            if is_verifying or not _is_ours(self.speculative_config):
                return original(self, logits, spec_decode_metadata)
            return original(self, logits, None)

        return _sample


PATCHES: tuple[type[Patch], ...] = (
    InitSpeculator,
    V2RunnerInit,
    V1RunnerInit,
    V1ProposeDraftTokenIds,
    V1InputFitsInDrafter,
    ExpandBatchToTokens,
    V1Sample,
    *lora.PATCHES,
    *watch.PATCHES,
)
