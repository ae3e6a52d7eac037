"""Targets on transformers, for training and evaluation; serving uses vLLM's own models."""

from vllm_mtpc.hf.device import choose_device
from vllm_mtpc.hf.model import Target, load_target

__all__ = ["Target", "choose_device", "load_target"]
