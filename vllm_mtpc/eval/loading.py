"""Load heads with their targets, and take prompts from data, for the commands of evaluation."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor

from vllm_mtpc.checkpoint import read_config, resolve_head, resolve_verifier
from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.data.sources import Documents
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.evaluator import Evaluator
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.hf import Target, choose_device, load_target


def resolve(name: str) -> tuple[Path, AnyHeadConfig]:
    """Return folder and config of a head without loading it. Raises CheckpointError or HeadConfigError."""
    folder = resolve_head(name)
    return folder, read_config(folder)


def target_of(folder: Path, config: AnyHeadConfig, given: str | None) -> str:
    """Return the target's name: ``given``, or the head's verifier."""
    return given or resolve_verifier(folder, config.speculators_config.verifier.name_or_path)


def prepare(args: Namespace) -> AnyHeadConfig:
    """Return the config of ``args.head``; set temperature (a list), top_k and top_p to the family's defaults.

    Raises UsageError for options that the family does not support and values that are not allowed, before loading.
    """
    config = resolve(args.head)[1]
    family = FAMILIES[config.speculators_model_type].evaluator
    temperature, top_k, top_p = family.default_sampling(config)
    args.temperature = [temperature, 0.0] if args.temperature is None else args.temperature
    args.top_k = top_k if args.top_k is None else args.top_k
    args.top_p = top_p if args.top_p is None else args.top_p
    for value in args.temperature:
        Sampling(value, args.top_p, top_k=args.top_k)
    family.check_options(args)
    return config


def load(name: str, target: str | None = None, dtype: str = "auto", device: str = "auto") -> Evaluator:
    """Load a head and its target, which computes in ``dtype``. Raises MtpcError where either cannot be loaded."""
    folder, config = resolve(name)
    target_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    model = load_target(target_of(folder, config, target), target_dtype, choose_device(device), attention="torch")
    return attach(folder, model)


def attach(folder: Path, target: Target) -> Evaluator:
    """Load the head of a folder for a loaded target. Raises UsageError where their sizes differ."""
    config = read_config(folder)
    for name in ("vocab_size", "hidden_size"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise UsageError(
                f"head {folder} has {name}={ours}, but target {target.name} has {theirs}; give --target the one it was "
                f"trained for ({config.speculators_config.verifier.name_or_path})"
            )
    return FAMILIES[config.speculators_model_type].evaluator.attach(folder, target)


def prompts(documents: Documents, count: int, prompt_tokens: int, seed: int) -> list[Tensor]:
    """Return ``count`` prompts (1-D int64): the tokens before a document's first trained one, else a crop of its text.

    Crops have ``prompt_tokens`` tokens and start anywhere; shorter documents are skipped. The seed fixes the order of
    documents, which are used again where there are too few. Raises UsageError where no document gives a prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    while len(found) < count:
        before = len(found)
        for index in torch.randperm(len(documents), generator=generator).tolist():
            tokens, trained = documents[index]
            first = int(trained.argmax()) if trained.any() else 0
            if first:
                found.append(torch.from_numpy(tokens[:first].copy()).long())
            elif len(tokens) >= prompt_tokens:
                start = int(torch.randint(len(tokens) - prompt_tokens + 1, (), generator=generator))
                found.append(torch.from_numpy(tokens[start : start + prompt_tokens].copy()).long())
            if len(found) == count:
                break
        if len(found) == before:
            raise UsageError(
                f"no document has {prompt_tokens} tokens to be a prompt; give longer text or lower --prompt-tokens"
            )
    return found
