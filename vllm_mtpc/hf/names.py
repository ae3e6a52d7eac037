"""Config and tokenizer of a target's name, read by transformers. Code that a repository ships is never run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.errors import UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNREADABLE = (OSError, ValueError, KeyError)  # transformers raises all of these on bad input
NO_REMOTE_CODE = {"trust_remote_code": False}  # unset, transformers asks on the terminal
# Models of this package, which vLLM runs and transformers does not know (vllm_mtpc/models/registration.py)
SERVED_ONLY = ("EvaByteForCausalLM", "TPULlamaForCausalLM")


def target_config(name: str | Path) -> Any:
    """The whole config of a target. Raises UsageError, also for models that only vLLM runs."""
    from transformers import AutoConfig, PretrainedConfig

    try:
        values, _ = PretrainedConfig.get_config_dict(str(name))
        for architecture in values.get("architectures") or ():
            if architecture in SERVED_ONLY:
                raise UsageError(
                    f"target {name}: {architecture} runs in vLLM alone, so heads for it can be served, converted "
                    "(vllm-mtpc convert, token-heads) and measured with vllm-mtpc bench serve, but not trained, "
                    "evaluated or doctored; name a target that transformers has"
                )
        return AutoConfig.from_pretrained(name, **NO_REMOTE_CODE)
    except UsageError:
        raise
    except UNREADABLE as error:
        raise UsageError(
            f"target {name}: no config that transformers can read ({reason(error)}); "
            "name the folder or hub repository of a causal language model"
        ) from None


def target_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a target. Raises UsageError where transformers has none for it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **NO_REMOTE_CODE)
    except UNREADABLE as error:
        raise UsageError(
            f"target {name}: no tokenizer to be had ({reason(error)}); "
            "correct the name, or name a target with a tokenizer that transformers has"
        ) from None


def tokenizer_if_any(name: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a target, or None: token ids can be trained on and continued without one."""
    try:
        return target_tokenizer(name)
    except UsageError:
        return None


def reason(error: Exception) -> str:
    """Why transformers refuses, in a few words."""
    if "trust_remote_code" in str(error):
        return "it needs Python code of its own repository, which is never run here"
    return first_line(error)
