"""Wrong options of heads are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.circuit_checks import build as sized
from tests.support.heads_zoo import D, V, build
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.init import init_from_head
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.heads.trunk.lora import LoraDraftLayers
from vllm_mtpc.hf import Target, load_target

TARGET = {"hidden_size": 32, "vocab_size": 9, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 48}
SIZES = {"circuit": "cp", "window": 4, "num_components": 2, "verifier": "../target"}
BACKBONE, LM_HEAD = {"kind": "backbone"}, {"kind": "lm_head"}
CONFIGS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [  # trunk, leaves
    ({"kind": "none"}, {"kind": "own", "component_rank": 3}, ["leaves: unknown key 'component_rank'", "token_rank"]),
    ({"kind": "medusa"}, LM_HEAD, ["trunk='medusa'", "none, mlp, lora, backbone, drafter"]),
    ({"kind": "none"}, {"kind": "shared"}, ["leaves='shared'", "own, lm_head"]),
    ({"kind": "mlp", "layers": 3}, LM_HEAD, ["trunk: ", "layers", "3", "1 or 2"]),
    ({"kind": "mlp", "width": 0}, LM_HEAD, ["width", "0"]),
    ({"kind": "lora", "layers": 3}, LM_HEAD, ["layers", "3", "1, 2 or 4"]),
    (BACKBONE, {**LM_HEAD, "component_rank": 0}, ["component_rank=0 and expander_rank=0", "set leaves.component_rank"]),
    ({**BACKBONE, "layers": 6}, LM_HEAD, ["layers", "6", "5"]),
    ({**BACKBONE, "kv_heads": 3}, LM_HEAD, ["kv_heads=3 does not divide heads=4"]),
    ({**BACKBONE, "head_dim": 7}, LM_HEAD, ["head_dim", "7", "multiple of 2"]),
    ({**BACKBONE, "aux_hidden_state_layer_ids": [3, 2]}, LM_HEAD, ["[3, 2]", "rising"]),
    ({**BACKBONE, "aux_hidden_state_layer_ids": [9]}, LM_HEAD, ["[9]", "numbers from 0 to 8"]),
    ({**BACKBONE, "aux_hidden_state_layer_ids": []}, LM_HEAD, ["aux_hidden_state_layer_ids", "1 item"]),
    ({"kind": "drafter", "method": "medusa"}, LM_HEAD, ["medusa", "'mtp', 'eagle3', 'dflash' or 'dspark'"]),
]
SOURCES: list[tuple[tuple[Any, ...], tuple[Any, ...], list[str]]] = [  # circuit, r, head, n, V of a head and its source
    (("cp", 2, "linear"), ("cp", 2, "shared"), ["leaves=own", "leaves=lm_head"]),
    (("cp", 2, "mlp own"), ("cp", 2, "linear"), ["trunk=mlp", "trunk=none"]),
    (("cp", 3, "linear"), ("cp", 2, "linear"), ["num_components=3", "multiples of 2"]),
    (("cp", 2, "linear"), ("cp", 4, "linear"), ["num_components=2", "multiples of 4"]),
    (("cp", 2, "linear"), ("hmm", 2, "linear"), ["circuit=cp", "circuit=hmm", "allowed: hmm"]),
    (("btree", 2, "linear"), ("hmm", 2, "linear"), ["circuit=btree", "allowed: hmm"]),
    (("cp", 2, "linear", 4), ("cp", 2, "linear", 5), ["window=4", "window=5"]),
    (("hmm", 2, "linear", 5), ("hmm", 2, "linear", 4), ["window=5", "window=4"]),  # inner sums are of a position
    (("cp", 2, "linear", 4, 5), ("cp", 2, "linear", 4), ["vocab_size=5", f"vocab_size={V}"]),
]
RANKS = [("shared", "expander_rank", 2), ("low rank", "component_rank", 2), ("low rank", "component_rank", 0)]
ONE = torch.zeros(1, dtype=torch.long)
UNBOUND = [("shared", (1, D), ["bind_lm_head"]), ("backbone", (1, 5, D), ["bind_lm_head"])]
UNBOUND.append(("mlp own", (1, D), ["bind_embedding"]))
TARGETS: list[tuple[str, dict[str, Any], Any, list[str]]] = [  # what is built on a target
    ("llama", {"num_hidden_layers": 2}, lambda target: LoraDraftLayers(target, 2), ["2 layers", "lower lora_layers"]),
    ("gpt2", {}, lambda target: LoraDraftLayers(target, 1), ["GPT2Model", "lora_layers to 0"]),
    ("gpt2", {}, lambda target: student_of(target), ["is not made of `layers`"]),
    ("mistral", {"sliding_window": 8}, lambda target: student_of(target), ["sliding_attention", "full_attention"]),
]


def student_of(target: Target) -> Student:
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 5}
    return Student(target, PtpConfig.create(variant="o-ptp", window=4, target=sizes, verifier="t"))


def start(rank: str, name: str, size: int) -> None:
    init_from_head(sized("cp", 2, name, **{rank: 1}), sized("cp", 2, name, **{rank: size}))


REFUSED = [
    *((lambda t=t, o=o: HeadConfig.create(**SIZES, target=TARGET, trunk=t, leaves=o), w) for t, o, w in CONFIGS),
    (lambda: HeadConfig.create(**SIZES, target=TARGET, draft_vocab_size=9), ["draft_vocab_size=9 with vocab_size=9"]),
    *((lambda a=a, b=b: init_from_head(sized(*a), sized(*b)), words) for a, b, words in SOURCES),
    *((lambda o=o, n=n, k=k: start(o, n, k), [f"{o}=1", f"{o}={k}"]) for n, o, k in RANKS),
    *((lambda n=n, s=s: build(n, bind=False)(torch.zeros(s), ONE), words) for n, s, words in UNBOUND),
    (lambda: build("backbone", bind=False).trunk.queries(ONE), ["bind_embedding"]),
    (
        lambda: init_from_head(build("mlp", ids=[0, 1]), build("mlp")),
        ["draft_vocab_size=2", f"draft_vocab_size={V}", "set that"],
    ),
]


@pytest.mark.parametrize("attempt, words", REFUSED)
def test_wrong_option_is_refused_in_one_line(attempt: Any, words: list[str]) -> None:
    with pytest.raises(HeadConfigError) as caught:
        attempt()
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize("model_type, changes, attempt, words", TARGETS)
def test_target_without_such_layers_is_refused(
    tmp_path: Path, make_target: Any, model_type: str, changes: Any, attempt: Any, words: list[str]
) -> None:
    changes = {"n_embd": 32, "n_head": 4, "n_layer": 5} if model_type == "gpt2" else changes
    target = load_target(make_target(tmp_path, model_type, **changes), attention="torch")
    with pytest.raises(HeadConfigError) as caught:
        attempt(target)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), caught.value


def test_adapters_of_another_target_are_refused(target: Target, tmp_path: Path, make_target: Any) -> None:
    other = load_target(make_target(tmp_path / "other", intermediate_size=64), attention="torch")
    with pytest.raises(HeadConfigError, match="name the target the head was trained for"):
        LoraDraftLayers.load(LoraDraftLayers(target, 2).adapters, other)
