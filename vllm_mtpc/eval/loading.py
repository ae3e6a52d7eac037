"""What the commands work on: the evaluator of a head on its target, and prompts out of data."""

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
    """Folder and config of a head, nothing loaded yet. Raises CheckpointError or HeadConfigError."""
    folder = resolve_head(name)
    return folder, read_config(folder)


def target_of(folder: Path, config: AnyHeadConfig, given: str | None) -> str:
    """The target's name: as given, or the head's verifier."""
    return given or resolve_verifier(folder, config.speculators_config.verifier.name_or_path)


def prepare(args: Namespace) -> AnyHeadConfig:
    """The config of ``args.head``; a temperature (a list), top_k and top_p not given become its family's defaults.

    Raises UsageError for what the family does not have or is not allowed: nothing is loaded yet.
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
    """A head with its target, which computes in ``dtype``. Raises what loading either and ``attach`` raise."""
    folder, config = resolve(name)
    target_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    model = load_target(target_of(folder, config, target), target_dtype, choose_device(device), attention="torch")
    return attach(folder, model)


def attach(folder: Path, target: Target) -> Evaluator:
    """The head of a folder on a target that is loaded. Raises UsageError where they do not fit."""
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
    """``count`` prompts (1-D int64): what stands before a document's first trained token, else a crop of its text.

    Crops have ``prompt_tokens`` tokens and start anywhere; documents shorter than that are passed over. Documents are
    taken in an order fixed by the seed, again from the start where there are too few. Raises UsageError where no
    document gives a prompt.
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
