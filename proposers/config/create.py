"""From what a user writes in `speculative_config` to a checked configuration, in the caller's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig

from vllm_mtpc.checkpoint import check_tensors, find_head, read_config, resolve_head
from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.errors import ServeConfigError, did_you_mean, one_line
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.heads import needs_lm_head
from vllm_mtpc.proposers.config import schedule
from vllm_mtpc.proposers.config.mtpc import MtpcSpeculativeConfig

REJECTION_METHODS = ("standard", "block", "synthetic")  # vLLM 0.33's "fly" keeps drafts that must be rejected


def create(**given: Any) -> MtpcSpeculativeConfig:
    """The validated config for a user's `speculative_config` plus vLLM's target_* entries, of the method it names.

    Raises ServeConfigError, CheckpointError or HeadConfigError, each one line.
    """
    target: ModelConfig = given.pop("target_model_config")
    parallel: ParallelConfig = given.pop("target_parallel_config")
    given = {key: value for key, value in given.items() if value is not None}
    config_class = FAMILIES[given["method"]].serving
    _check_request(given, config_class.user_keys)
    folder = _head_folder(given, target)
    head = read_config(folder)
    _check_method(folder, head, given["method"])
    _check_fit(folder, head, given, target)
    check_tensors(folder, head)
    config_class.check_target(folder, head, target, parallel)
    given.setdefault("draft_sample_method", getattr(head, "draft_sample_method", "greedy"))
    drafts = given.setdefault("num_speculative_tokens", head.num_speculative_tokens)
    wants_default = schedule.KEY not in given
    if not wants_default:
        given[schedule.KEY] = schedule.chosen(given[schedule.KEY], drafts)
    try:
        made = config_class(
            **{**given, "model": str(folder), "model_folder": str(folder), "head": head},
            target_model_config=target,
            target_parallel_config=parallel,
        )
    except ValidationError as error:
        raise ServeConfigError(f"speculative_config: {one_line(error, list(config_class.user_keys))}") from None
    # no default where data-parallel ranks step together, or prescribed acceptance says nothing about drafts
    together = parallel.data_parallel_size > 1 and target.is_moe
    if wants_default and not together and made.rejection_sample_method != "synthetic":
        made.num_speculative_tokens_per_batch_size = made.default_schedule()
        made.has_default_schedule = True
    if parallel.data_parallel_size > 1 and not together:  # vLLM drops it, though each engine runs by itself
        made.own_schedule = made.num_speculative_tokens_per_batch_size
        made.num_speculative_tokens_per_batch_size = None
    if made.rejection_sample_method == "synthetic":  # whatever the drafts are
        if made.min_survival is None:
            made.min_survival = 0.0
        made.verify = "rejection"
    return made


def _check_request(given: dict[str, Any], user_keys: tuple[str, ...]) -> None:
    """What can be said without looking at the head."""
    unknown = [key for key in given if key not in user_keys]
    if unknown:
        raise ServeConfigError(
            f"speculative_config: {unknown[0]!r} is not an option of method {given['method']!r}; allowed: "
            f"{', '.join(user_keys)}; remove it{did_you_mean(unknown[0], user_keys)}"
        )
    if (rule := given.get("rejection_sample_method", "standard")) not in REJECTION_METHODS:
        raise ServeConfigError(
            f"speculative_config: rejection_sample_method={rule!r} does not keep the target's distribution or is not "
            f"known; allowed: {', '.join(REJECTION_METHODS)}; drop it"
        )
    if rule != "standard" and given.get("verify") == "coupled":
        raise ServeConfigError(
            f"speculative_config: rejection_sample_method={rule!r} with verify='coupled', which rejects nothing; "
            "allowed: 'standard'; drop one of them"
        )


def _head_folder(given: dict[str, Any], target: ModelConfig) -> Path:
    if "model" in given:
        folder = resolve_head(str(given["model"]), given.get("revision"))
        return find_head(folder) or folder  # a folder without a head is refused by name when it is read
    shipped = find_head(target.model) if Path(target.model).is_dir() else _shipped_on_hub(target)
    if shipped is None:
        raise ServeConfigError(
            f"speculative_config: no 'model' given and {target.model} ships no head in mtpc/; "
            'name one: {"method": "mtpc", "model": "HEAD_FOLDER"}'
        )
    return shipped


def _shipped_on_hub(target: ModelConfig) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(target.model, revision=target.revision, allow_patterns=["mtpc/*"])
    except Exception:  # offline, private or absent: all mean that no head can be had from there
        return None
    return find_head(folder)


def _check_method(folder: Path, head: AnyHeadConfig, method: str) -> None:
    """Refuse a head of the other family."""
    if head.speculators_model_type != method:
        raise ServeConfigError(
            f"speculative_config: head {folder} is of method {head.speculators_model_type!r}, not {method!r}; "
            f'type {{"method": "{head.speculators_model_type}"}}'
        )


def _check_fit(folder: Path, head: AnyHeadConfig, given: dict[str, Any], target: ModelConfig) -> None:
    """Refuse a head made for another target, and more drafts than its window holds."""
    sizes = (
        ("vocab_size", head.vocab_size, target.get_vocab_size()),
        ("hidden_size", head.hidden_size, target.get_hidden_size()),
    )
    for name, ours, theirs in sizes:
        if ours != theirs:
            raise ServeConfigError(
                f"speculative_config: head {folder} has {name}={ours}, but target {target.model} has {theirs}; "
                f"use a head trained for this target (this one was trained for "
                f"{head.speculators_config.verifier.name_or_path})"
            )
    if (copies := getattr(target.hf_config, "hc_mult", 1)) > 1:
        from vllm.model_executor.model_loader.utils import get_model_cls

        if hasattr(get_model_cls(target), "get_mtp_target_hidden_states"):  # as vLLM's speculators find out
            raise ServeConfigError(
                f"speculative_config: target {target.model} hands out hidden states of {copies} x {head.hidden_size} "
                f"numbers, the copies of its residual stream; head {folder} reads hidden_size={head.hidden_size}: "
                "allowed are targets that hand out what leaves their final norm; drop speculative_config"
            )
    if given.get("head_dtype") == "fp8" and needs_lm_head(head.head):
        raise ServeConfigError(
            f"speculative_config: head_dtype='fp8', but head {folder} (head={head.head!r}) has no unembeddings of its "
            "own to keep in float8; allowed: auto, bfloat16, float16, float32; remove head_dtype"
        )
    drafts = given.get("num_speculative_tokens")
    if drafts is not None and (not isinstance(drafts, int) or not 1 <= drafts <= head.window - 1):
        raise ServeConfigError(
            f"speculative_config: num_speculative_tokens={drafts}; head {folder} has window={head.window} and its "
            f"first token is the target's own, so allowed are 1 to {head.window - 1}; lower it or leave it out"
        )
