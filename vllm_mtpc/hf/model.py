"""A target on transformers: its backbone, its lm_head, and hidden states of packed rows.

What a head reads and is verified by, without vLLM: training and evaluation use this; serving uses vLLM's own model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vllm_mtpc.errors import UsageError
from vllm_mtpc.hf.names import NO_REMOTE_CODE, UNREADABLE, reason, target_config, tokenizer_if_any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Target:
    """A frozen causal language model in eval mode."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    backbone: nn.Module  # input ids -> hidden states after the final norm
    lm_head: nn.Module
    attention: str  # "torch" or "xformers"

    @property
    def config(self) -> Any:
        """The config of the language model itself, also inside a composite model."""
        return self.model.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        return self.lm_head.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.lm_head.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @torch.no_grad()
    def hidden(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Post-final-norm states [B, S, D] of tokens[B, S]; state t has read the tokens of its document up to t.

        documents[B, S] numbers the document of each token (-1: padding); neither attention nor positions cross one.
        """
        tokens = tokens.to(self.device, torch.long)
        return self.backbone(input_ids=tokens, use_cache=False, **self.packed(documents)).last_hidden_state

    def packed(self, documents: Tensor | None) -> dict[str, Any]:
        """Arguments of the backbone for rows that hold several documents; none where there is one per row."""
        from vllm_mtpc.hf.attention import packed_arguments

        return {} if documents is None else packed_arguments(documents.to(self.device), self.attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of hidden[..., D], float32, with the model's own scale and soft cap."""
        logits = self.lm_head(hidden.to(self.dtype)).float()
        if scale := getattr(self.config, "logit_scale", None):  # Cohere multiplies
            logits = logits * scale
        if scaling := getattr(self.config, "logits_scaling", None):  # Granite divides
            logits = logits / scaling
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits


def load_target(
    name: str | Path, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu", attention: str = "auto"
) -> Target:
    """The target named by a folder or hub name. Raises UsageError in one line."""
    from transformers import AutoModelForCausalLM

    from vllm_mtpc.hf.attention import choose_attention

    name = str(name)
    backend = choose_attention(attention, torch.device(device))
    # transformers' PyTorch attention leaves out the soft cap of attention logits (Gemma 2); its own does not
    capped = getattr(target_config(name).get_text_config(), "attn_logit_softcapping", None) is not None
    implementation = "eager" if capped else backend.implementation
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation=implementation, output_loading_info=True, **NO_REMOTE_CODE
        )
    except (*UNREADABLE, RuntimeError) as error:
        raise UsageError(
            f"target {name}: not a causal language model that transformers can load ({reason(error)}); "
            "name the folder or hub repository of one"
        ) from None
    _check(name, model, found["missing_keys"])
    tokenizer = tokenizer_if_any(name)
    model = model.to(device).eval().requires_grad_(False)
    return Target(
        name, model, tokenizer, model.base_model, model.get_output_embeddings(), "torch" if capped else backend.name
    )


def _check(name: str, model: PreTrainedModel, missing: Collection[str]) -> None:
    """transformers makes up weights that are not in the files; a target with such weights is none."""
    if model.get_output_embeddings() is None or model.base_model is model:
        raise UsageError(
            f"target {name}: {type(model).__name__} has no lm_head, so it cannot verify drafts; "
            "name a causal language model (…ForCausalLM)"
        )
    if missing:
        raise UsageError(
            f"target {name}: its files have no {sorted(missing)[0]} ({len(missing)} tensors of {type(model).__name__} "
            "are missing), so it cannot verify drafts; name a causal language model (…ForCausalLM) with all its weights"
        )


def check_length(target: Target, tokens: Sequence[Tensor], new_tokens: int, flag: str) -> None:
    """Raises UsageError where a text would be longer than the target can read."""
    limit, longest = getattr(target.config, "max_position_embeddings", None), max(map(len, tokens))
    if limit is not None and longest + new_tokens > limit:
        raise UsageError(
            f"a prompt of {longest} tokens and {new_tokens} new ones (drafts past the end included) are more than the "
            f"{limit} positions of target {target.name}; lower {flag}"
        )
