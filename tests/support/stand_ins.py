"""What tests hand to vLLM's classes in the place of its own objects."""

from __future__ import annotations

from types import SimpleNamespace

from vllm.config import SpeculativeConfig


def spec_config(num_speculative_tokens: int) -> SimpleNamespace:
    """A SpeculativeConfig that nobody checked: the installed vLLM's defaults, and so many drafts."""
    fields = SpeculativeConfig.__pydantic_fields__
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    return SimpleNamespace(**{**defaults, "num_speculative_tokens": num_speculative_tokens})
