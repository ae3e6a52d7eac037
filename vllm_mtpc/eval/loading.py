"""What the commands work on: a head with its target, and prompts out of data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_mtpc.checkpoint import find_head, load_head, read_config, resolve_head, resolve_verifier
from vllm_mtpc.config.ptp import PtpConfig
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.acceptance import check_drafts
from vllm_mtpc.eval.sampling import Sampling
from vllm_mtpc.hf import Target, choose_device, load_target

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mtpc.config.mtpc import HeadConfig
    from vllm_mtpc.data.documents import Documents
    from vllm_mtpc.heads.adapters import DraftLayers
    from vllm_mtpc.heads.base import Head
    from vllm_mtpc.heads.ptp.student import Student


@dataclass(frozen=True)
class Loaded:
    """A head in float32 on its target's device, ready to be called."""

    folder: Path
    config: HeadConfig
    head: Head
    target: Target
    draft_layers: DraftLayers | None = None

    def sampling(self, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampling:
        """A temperature, top-p and top-k, with drafts picked as the head is served by default."""
        greedy_drafts = self.config.draft_sample_method == "greedy"
        return Sampling(temperature, top_p, greedy_drafts, top_k)


@dataclass(frozen=True)
class LoadedPtp:
    """A PTP head on its target."""

    folder: Path
    config: PtpConfig
    student: Student
    target: Target

    def sampling(self, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampling:
        """A temperature, top-p and top-k of the target; a draft is a function of u, so there is no law of drafts."""
        return Sampling(temperature, top_p, top_k=top_k)


def place(name: str) -> tuple[Path, HeadConfig | PtpConfig]:
    """Folder and config of a head, nothing loaded yet. Raises CheckpointError or HeadConfigError."""
    found = resolve_head(name)
    folder = find_head(found) or found
    return folder, read_config(folder)


def target_of(folder: Path, config: HeadConfig | PtpConfig, given: str | None) -> str:
    """The target's name: as given, or the head's verifier."""
    return given or resolve_verifier(folder, config.speculators_config.verifier.name_or_path)


def drafts_of(config: HeadConfig | PtpConfig, given: int | None) -> int:
    """Drafts per step: as given, or as the head says. Raises UsageError where its window has not so many."""
    return config.num_speculative_tokens if given is None else check_drafts(config.window, given)


def load(
    name: str,
    target: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    head_dtype: torch.dtype = torch.float32,
) -> Loaded | LoadedPtp:
    """A head with its target. Raises UsageError where they do not fit, and what loading either raises."""
    folder, config = place(name)
    target_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    model = load_target(target_of(folder, config, target), target_dtype, choose_device(device), attention="torch")
    return join(folder, model, head_dtype)


def join(folder: Path, target: Target, head_dtype: torch.dtype = torch.float32) -> Loaded | LoadedPtp:
    """The head of a folder on a target that is loaded. Raises UsageError where they do not fit.

    The adapters of a PTP head are float32 whatever ``head_dtype``.
    """
    config = read_config(folder)
    _check_sizes(folder, config, target)
    if isinstance(config, PtpConfig):
        from vllm_mtpc.checkpoint.ptp import load_student

        student = load_student(folder, target)
        return LoadedPtp(folder, config, student, target)
    config, head = load_head(folder, head_dtype, target.device)
    if head.needs_lm_head:
        head.bind_lm_head(target.logits)
    layers = None
    if config.lora_layers:
        from vllm_mtpc.heads.adapters import DraftLayers

        layers = DraftLayers.load(folder, target)
    return Loaded(folder, config, head, target, layers)


def _check_sizes(folder: Path, config: HeadConfig | PtpConfig, target: Target) -> None:
    for name, ours, theirs in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.hidden_size, target.hidden_size),
    ):
        if ours != theirs:
            raise UsageError(
                f"head {folder} has {name}={ours}, but target {target.name} has {theirs}; give --target the one it was "
                f"trained for ({config.speculators_config.verifier.name_or_path})"
            )


def refuse_draft_layers(loaded: Loaded, what: str) -> None:
    """Raises UsageError where the head reads draft layers, which only the analytic figures support."""
    if loaded.draft_layers is not None:
        raise UsageError(
            f"head {loaded.folder} has lora_layers={loaded.config.lora_layers}: {what} does not run draft layers; use "
            "vllm-mtpc eval without --simulate, or vllm-mtpc doctor"
        )


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


def check_length(target: Target, tokens: Sequence[Tensor], new_tokens: int, flag: str) -> None:
    """Raises UsageError where a text would be longer than the target can read."""
    limit, longest = getattr(target.config, "max_position_embeddings", None), max(map(len, tokens))
    if limit is not None and longest + new_tokens > limit:
        raise UsageError(
            f"a prompt of {longest} tokens and {new_tokens} new ones (drafts past the end included) are more than the "
            f"{limit} positions of target {target.name}; lower {flag}"
        )
