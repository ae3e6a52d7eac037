"""Targets on transformers, for training and evaluation; serving uses vLLM's own models."""

from vllm_mtpc.hf.device import choose_device
from vllm_mtpc.hf.model import Target, check_length, load_target

__all__ = ["Target", "check_length", "choose_device", "load_target"]
