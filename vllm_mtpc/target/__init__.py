"""Targets on transformers, for training and evaluation; serving uses vLLM's own models."""

from vllm_mtpc.target.model import Target, TargetError, load_target

__all__ = ["Target", "TargetError", "load_target"]
