"""Ways of decoding that `vllm-mtpc bench serve` puts side by side, the engine of each, and what keeps one from running.

All engines have the same settings, offline or behind HTTP.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mtpc.bench import serve
from vllm_mtpc.engine.options import flags
from vllm_mtpc.engine.passes import Prompt, Resident, launched
from vllm_mtpc.engine.speculation import Speculation
from vllm_mtpc.errors import UsageError
from vllm_mtpc.families import FAMILIES

LOOKUP = {"prompt_lookup_max": 5, "prompt_lookup_min": 2}  # of ngram: the most tokens/step on the demo of those tried
DRAFTS = 5  # of peers, where no number is given
CHOOSE_LENGTH = ("suffix", "dspark")  # methods that know how much to draft
PEERS = ("ngram", "suffix", "mtp")
INTERPRETER = Path(__file__).parents[2] / "scripts" / "interpreter"
INTERPRETED = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": str(INTERPRETER)}
OWN = "own runner"
V2_INTERPRETED = "V2, interpreted"
CPU_CACHE_BYTES = 256 << 20  # of KV cache for each engine: several are alive at once
Engine = Resident | serve.Served


@dataclass(frozen=True, eq=False)
class Decoding:
    """One way of decoding. ``group``: it is compared with plain vLLM of the same group alone."""

    name: str
    speculative: dict[str, Any] | None = None  # vLLM's speculative_config; None: plain
    circuit: str | None = None  # of an MtPC head
    group: str = OWN

    @property
    def is_plain(self) -> bool:
        return self.speculative is None

    @property
    def is_ours(self) -> bool:
        return (self.speculative or {}).get("method") in FAMILIES

    @property
    def environment(self) -> dict[str, str]:
        """What its engine's process needs besides what every engine gets."""
        return INTERPRETED if self.group == V2_INTERPRETED else {}


class Missing(NamedTuple):
    """A row that was not run."""

    name: str
    reason: str
    ours: bool = False  # a head of this package


def plain(group: str = OWN) -> Decoding:
    return Decoding("plain", group=group)


def peers(
    names: Sequence[str],
    given: Sequence[tuple[str, dict[str, Any]]],
    num_drafts: int | None,
    speculation: Speculation,
) -> tuple[list[Decoding], list[Missing]]:
    """Peers by name (PEERS), where they can be run, and those ``given`` by a name and a `speculative_config`.

    Raises UsageError where vLLM would refuse one that was given.
    """
    found: list[Decoding] = []
    missing: list[Missing] = []
    if "ngram" in names:
        found.append(Decoding("ngram", {"method": "ngram", "num_speculative_tokens": num_drafts or DRAFTS, **LOOKUP}))
    if "suffix" in names:
        if has_suffix_decoding():
            found.append(Decoding("suffix", {"method": "suffix"}))
        else:
            missing.append(Missing("suffix", "arctic-inference is not installed"))
    if "mtp" in names:
        one = _native(num_drafts, speculation)
        if isinstance(one, Decoding):
            found.append(one)
        else:
            missing.append(one)
    return found + [_given(name, value, num_drafts, speculation) for name, value in given], missing


def has_suffix_decoding() -> bool:
    return importlib.util.find_spec("arctic_inference") is not None


def _native(num_drafts: int | None, speculation: Speculation) -> Decoding | Missing:
    """The target's own MTP layers; as many drafts as layers, as vLLM's recipes have it."""
    layers = speculation.mtp_layers()
    if not layers:
        return Missing("MTP", "the target bundles no MTP layers that vLLM serves")
    value = {"method": "mtp", "num_speculative_tokens": num_drafts or layers}
    problem = speculation.problem(value)
    return Missing("MTP", problem) if problem else Decoding("MTP", value)


def _given(name: str, value: dict[str, Any], num_drafts: int | None, speculation: Speculation) -> Decoding:
    method, count = value.get("method"), num_drafts or DRAFTS
    if method in FAMILIES:
        raise UsageError(
            f"--peer {name}: method {method!r} is a head of this package; type --heads {value.get('model')}"
        )
    if method == "mtp" and "model" not in value:
        count = num_drafts or speculation.mtp_layers() or 1
    if method not in CHOOSE_LENGTH:
        value = {"num_speculative_tokens": count, **value}
    if problem := speculation.problem(value):
        raise UsageError(f"--peer {name}: {problem}")
    return Decoding(name, value)


def heads(
    names: Sequence[str], variants: dict[str, dict[str, Any]], num_drafts: int | None, on_gpu: bool
) -> tuple[list[Decoding], list[Missing]]:
    """Heads of this package by folder or hub name, each as it is and once more for every variant.

    A variant has a name and more of the speculative_config.

    PTP heads and draft layers need Model Runner V2: without a GPU its kernels are interpreted, in a group of their own.
    """
    from vllm_mtpc.eval.loading import resolve

    configs = [(name, resolve(name)[1]) for name in names]
    found, missing = [], []
    for label, (name, config) in zip(_labels(configs), configs, strict=True):
        given: dict[str, Any] = {"method": config.speculators_model_type, "model": name}
        if num_drafts:
            given["num_speculative_tokens"] = num_drafts
        circuit = getattr(config, "circuit", None)
        needs_v2 = getattr(config, "has_draft_layers", True)  # PTP heads always
        group = V2_INTERPRETED if needs_v2 and not on_gpu else OWN
        if group == V2_INTERPRETED and not INTERPRETER.is_dir():
            what = "draft layers need" if circuit else "PTP heads need"
            missing.append(Missing(label, f"{what} a GPU, or scripts/interpreter of this package's checkout", True))
            continue
        found.append(Decoding(label, given, circuit, group))
        found += [Decoding(f"{label}, {key}", {**given, **more}, circuit, group) for key, more in variants.items()]
    return found, missing


def kind_of(config: Any) -> str:
    """A head's circuit, or its variant."""
    return getattr(config, "circuit", None) or config.variant


def _labels(configs: Sequence[tuple[str, Any]]) -> list[str]:
    """A name for each head, no two the same: its folder with as many parents as tell it apart, and its kind.

    An FF head predicts the tokens of a window independently of each other, as Medusa's heads do.
    """
    places = [Path(os.path.abspath(name) if os.path.isdir(name) else name).parts for name, _ in configs]
    kinds = ["ff (Medusa-style)" if kind_of(config) == "ff" else kind_of(config) for _, config in configs]
    for depth in range(1, 1 + max(map(len, places), default=0)):
        folders = ["/".join(parts[-depth:]) for parts in places]
        if len(set(folders)) == len(folders):
            known = [name == kind_of(config) for name, (_, config) in zip(folders, configs, strict=True)]
            named = zip(folders, kinds, known, strict=True)
            return [kind if is_kind else f"{folder} [{kind}]" for folder, kind, is_kind in named]
    if configs:
        raise UsageError("the same head is named twice; name each head once")
    return []


def arguments(
    target: str, dtype: str, max_model_len: int, max_num_seqs: int, on_gpu: bool, more: dict[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` that every engine of a run gets; ``more`` wins."""
    on_cpu = {} if on_gpu else {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    return {
        "model": target,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": False,  # a prompt that comes again is read again
        "seed": 0,
        **on_cpu,
        **more,
    }


@contextlib.contextmanager
def start(
    decoding: Decoding, engine: dict[str, Any], prompts: Sequence[Prompt], logs: Path, over_http: bool
) -> Iterator[Engine]:
    """The engine of a way of decoding, ready. Raises EngineFailed where it does not start."""
    if not decoding.is_plain:
        engine = {**engine, "speculative_config": decoding.speculative}
    place = "".join(letter if letter.isalnum() else "-" for letter in f"{decoding.name}-{decoding.group}")
    log = logs / f"{place}.log"
    if over_http:
        with serve.server(command(engine), log, environment=decoding.environment) as client:
            yield serve.Served(client, prompts)
    else:
        with launched(engine, prompts, log, decoding.environment) as waiting:
            _ = waiting.about  # waits until it is ready
            yield waiting


def command(engine: dict[str, Any]) -> list[str]:
    """Keyword arguments of ``vllm.LLM`` as words of ``vllm serve``."""
    return [str(engine["model"]), *flags({key: value for key, value in engine.items() if key != "model"})]
