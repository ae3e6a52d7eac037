"""What of vLLM's configuration a byte-level Llama refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.models.byte_llama.config import check_config
from vllm_mtpc.models.limits import check_limits

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class ByteLlamaHook(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        check_config(model_config.hf_config)

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        check_limits(vllm_config, "a byte-level Llama")
        if vllm_config.model_config.enable_prompt_embeds:
            raise ServeConfigError(
                "--enable-prompt-embeds with a byte-level Llama: an embedding needs the ids before it; leave it out"
            )
