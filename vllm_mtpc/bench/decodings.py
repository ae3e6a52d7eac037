"""Ways of decoding that `vllm-mtpc bench serve` compares, and reasons why one cannot run here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mtpc.engine.options import ON_CPU, count_mtp_layers
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.evaluator import resolve
from vllm_mtpc.families import FAMILIES

LOOKUP = {"prompt_lookup_max": 5, "prompt_lookup_min": 2}  # of ngram: the most tokens/step on the demo of those tried
DRAFTS = 5  # of peers, by default
CHOOSE_LENGTH = ("suffix", "dspark")  # methods that choose the number of drafts
PEERS = ("ngram", "suffix", "mtp")


@dataclass(frozen=True, eq=False)
class Decoding:
    """One way of decoding.

    Attributes:
        name: of its rows.
        speculative: vLLM's speculative_config; None: plain vLLM.
        is_required: whether the command fails if it cannot run: a head, or a peer that the user configured.
        fault: why it cannot run here; empty if it can.
    """

    name: str
    speculative: dict[str, Any] | None = None
    is_required: bool = False
    fault: str = ""

    @property
    def is_plain(self) -> bool:
        return self.speculative is None

    @property
    def is_ours(self) -> bool:
        return (self.speculative or {}).get("method") in FAMILIES


def find_peers(
    names: Sequence[str], configured: Mapping[str, dict[str, Any]], engine: dict[str, Any]
) -> list[Decoding]:
    """Return vLLM's own methods.

    Args:
        names: of PEERS.
        configured: speculative_config by name, of peers that the user configured.
        engine: keyword arguments of `vllm.LLM`.
    """
    found = []
    if "ngram" in names:
        found.append(Decoding("ngram", {"method": "ngram", "num_speculative_tokens": DRAFTS, **LOOKUP}))
    if "suffix" in names:
        fault = "" if importlib.util.find_spec("arctic_inference") else "arctic-inference is not installed"
        found.append(Decoding("suffix", {"method": "suffix"}, fault=fault))
    if "mtp" in names:
        layers = count_mtp_layers(engine)
        fault = "" if layers else "the target bundles no MTP layers that vLLM serves"
        found.append(Decoding("MTP", {"method": "mtp", "num_speculative_tokens": layers}, fault=fault))
    for name, config in configured.items():
        if config.get("method") not in CHOOSE_LENGTH:
            config = {"num_speculative_tokens": DRAFTS, **config}
        found.append(Decoding(name, config, is_required=True))
    return found


def find_heads(names: Sequence[str], variants: Mapping[str, dict[str, Any]], on_gpu: bool) -> list[Decoding]:
    """Return heads of this package, each with the options of its checkpoint and once more for every variant.

    PTP heads and draft layers need Model Runner V2: a GPU, or the interpreted kernels of scripts/v2_on_cpu.sh.

    Args:
        names: folders or hub names.
        variants: more of speculative_config by the variant's name.
        on_gpu: whether there is a GPU.

    Raises:
        UsageError: a head is named twice.
    """
    configs = [(name, resolve(name)[1]) for name in names]
    has_v2 = on_gpu or os.environ.get("TRITON_INTERPRET") == "1"
    found = []
    for label, (name, config) in zip(_labels(configs), configs, strict=True):
        given = {"method": config.speculators_model_type, "model": name}
        needs_v2 = getattr(config, "has_draft_layers", True)  # PTP heads always
        fault = "needs a GPU, or scripts/v2_on_cpu.sh vllm-mtpc bench serve ..." if needs_v2 and not has_v2 else ""
        for variant, more in {"": {}, **variants}.items():
            name = f"{label}, {variant}" if variant else label
            found.append(Decoding(name, {**given, **more}, is_required=True, fault=fault))
    return found


def _labels(configs: Sequence[tuple[str, Any]]) -> list[str]:
    """Return different names: the circuit or variant, after as many parent folders as tell the heads apart.

    An FF head predicts the tokens of a window independently of each other, as Medusa's heads do.
    """
    kinds = [getattr(config, "circuit", None) or config.variant for _, config in configs]
    paths = [Path(os.path.abspath(name) if os.path.isdir(name) else name).parts for name, _ in configs]
    for depth in range(1, 1 + max(map(len, paths), default=0)):
        folders = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(folders)) == len(folders):
            shown = ["ff (Medusa-style)" if kind == "ff" else kind for kind in kinds]
            named = zip(folders, kinds, shown, strict=True)
            return [label if folder == kind else f"{folder} [{label}]" for folder, kind, label in named]
    if configs:
        raise UsageError("the same head is named twice; name each head once")
    return []


def engine_arguments(
    target: str, dtype: str, max_model_len: int, max_num_seqs: int, on_gpu: bool, more: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of every engine of a run, by their names in `vllm.LLM`; `more` has precedence."""
    return {
        "model": target,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": False,  # prompts repeat
        "seed": 0,
        **({} if on_gpu else ON_CPU),
        **more,
    }
