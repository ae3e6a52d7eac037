"""EvaByte's tokenizer as vLLM loads one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class EvaByteTokenizer:
    """The tokenizer of vLLM's mode `evabyte`; of the model's files it reads `eos_token_id` only."""

    @classmethod
    def from_pretrained(
        cls, path_or_repo_id: str | Path, *args: Any, revision: str | None = None, **options: Any
    ) -> PreTrainedTokenizerFast:
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

        from vllm_mtpc.hf.bytes.tokenizer import DEFAULT_EOS, build_tokenizer

        config = get_hf_file_to_dict("config.json", path_or_repo_id, revision) or {}
        side = options.get("truncation_side", "left")
        made = build_tokenizer(config.get("eos_token_id", DEFAULT_EOS), truncation_side=side)
        made.name_or_path = str(path_or_repo_id)
        return get_cached_tokenizer(made)
