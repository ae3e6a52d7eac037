"""Ways of decoding that `vllm-mtpc bench serve` compares, and reasons why one cannot run here."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mtpc.engine.options import ON_CPU
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.evaluator import resolve
from vllm_mtpc.families import FAMILIES

PEERS = {  # vLLM's own methods, with the options that gave the most tokens/step on the demo of those tried
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
}


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
    """Return different names: the circuit or variant, after the folder if that has another name, and its parents.

    An FF head predicts the tokens of a window independently of each other, as Medusa's heads do.
    """
    paths = [Path(os.path.abspath(name)).parts for name, _ in configs]
    if len(set(paths)) < len(paths):
        raise UsageError("the same head is named twice; name each head once")
    depth = next(depth for depth in itertools.count(1) if len({path[-depth:] for path in paths}) == len(paths))
    labels = []
    for path, (_, config) in zip(paths, configs, strict=True):
        folder, circuit = "/".join(path[-depth:]), getattr(config, "circuit", None)
        kind = circuit.kind if circuit else config.variant
        label = "ff (Medusa-style)" if kind == "ff" else kind
        labels.append(label if folder == kind else f"{folder} [{label}]")
    return labels


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
