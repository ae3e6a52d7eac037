"""Targets on transformers, for training and evaluation; serving uses vLLM's own models."""

from vllm_mtpc.hf.model import Session, Target, bind, check_length, choose_device, load_target

__all__ = ["Session", "Target", "bind", "check_length", "choose_device", "load_target"]
