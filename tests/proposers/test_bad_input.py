"""Bad input is refused before an engine starts, in one line: a table each for engines, head folders and data."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint import conftest as heads
from tests.checkpoint.conftest import refusal as head_refusal
from tests.proposers.conftest import configured, rewrite, set_runner
from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.checkpoint.load import ADAPTER_DIGEST, ADAPTER_FILES, adapter_digest
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.files import MAX_HEADER
from vllm_mtpc.plan.draft_schedule import SCHEDULE_KEY

PIPELINE = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(autouse=True)
def clock() -> Iterator[None]:
    """A reader that hangs is ended; readers catch no BaseException."""

    def hung(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# ---- engines ---------------------------------------------------------------------------------------


@dataclass
class Case:
    """A head, options and changes of files, and parts of the message (by " .. ") that they are refused with."""

    wanted: str
    head: str = "head"
    options: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)  # changes of config.json
    config: dict[str, Any] = field(default_factory=dict)
    runner: int = 0  # 0: the default, V1 for circuits on a CPU and V2 for PTP
    given: dict[str, Any] = field(default_factory=dict)  # attributes of the configuration that a CPU lacks, by path
    targets: dict[str, Any] = field(default_factory=dict)  # attributes of vLLM's ModelConfig


def options(wanted: str, head: str = "head", /, **given: Any) -> Case:
    return Case(wanted, head, given)


def connector(is_layerwise: bool) -> dict[str, Any]:
    extra = {"use_layerwise": is_layerwise}
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}


MIMO = {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
GEMMA = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"}
BLOOM = {"model_type": "bloom", "architectures": ["BloomForCausalLM"]}
MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
SLIDING = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
STAGES, ASYNC = "parallel_config.pipeline_parallel_size", "scheduler_config.async_scheduling"
ENGINES = [
    # values of options
    *[options(f"num_speculative_tokens={k} .. 1 to 4", num_speculative_tokens=k) for k in (0, 5, 2.5, "3")],
    *[options(f"{key!r} .. num_speculative_tokens", **{key: "x"}) for key in ("quantization", "typo", "head")],
    *[options(key, "o-ptp", **{key: value}) for key, value in {"draft_pass": "three", "max_aux_rows": 1}.items()],
    options("draft_sample_method", draft_sample_method="beam"),
    options("head_dtype .. 'bfloat16'", head_dtype="fp8"),
    options("'rejection_sample_method' = 'fly' .. 'standard', 'block' or 'synthetic'", rejection_sample_method="fly"),
    options("'block' with verify='coupled' .. 'standard'", rejection_sample_method="block", verify="coupled"),
    options("Model Runner V1 .. 'standard'", rejection_sample_method="block"),
    options("verify 'coupled' on Model Runner V1 .. 'rejection'", verify="coupled"),
    options("Model Runner V1 does not support: adaptive draft verification", enable_adaptive_verification=True),
    *[options(f"{SCHEDULE_KEY}={value!r}: .. {reason} .. 0 to 4 drafts .. \"off\" .. type", **{SCHEDULE_KEY: value})
      for value, reason in (("on", "must be a non-empty list"), ([[1, 8]], "must be a 3-item sequence"),
                            ([[1, 8, None]], "int() argument"), ([[1, 8, 5]], "5 drafts are more than num_"),
                            ([[2, 8, 1]], "must start at 1"))],
    # the head and its files
    options("is of method 'mtpc', not 'ptp' .. \"method\": \"mtpc\"", method="ptp"),
    options("bundles no head in mtpc/", model=None),
    options("the folder does not exist", "nowhere"),
    options("is a file .. model.safetensors", "head/model.safetensors"),
    options("not a readable safetensors file", "damaged"),
    Case("vocab_size=33, target", "vocab"),
    # the target
    Case("MiMoForCausalLM, which returns hidden states from before its final norm .. "
         '{"method": "mtp", "num_speculative_tokens": 1}', target=MIMO),
    Case("full attention .. MtPC", "o-ptp", target=SLIDING),
    Case("(MLA) .. use an MtPC head", "o-ptp", targets={"use_mla": True}),
    Case("is GemmaForCausalLM .. LlamaForCausalLM .. another trunk", "layered", target=GEMMA),
    Case("a target with 2 layers .. has 3", "layered", target={"num_hidden_layers": 3}),
    Case("compresses keys and values (MLA) .. use a head with another trunk", "backbone", targets={"use_mla": True}),
    Case("several positions per token .. use a head with another trunk", "backbone", targets={"uses_mrope": True}),
    Case("does not return its layers' states", "backbone", target=BLOOM),
    Case("reads drafter mtp of the target, which vLLM .. refuses .. use a head with another trunk", "hosted", runner=2),
    Case("drafter: no folder .. nothing; copy the checkpoint there, or correct model", "lost", runner=2),
    Case("reads layer 2: allowed: 0 to 1 of", "backbone", target={"num_hidden_layers": 1},
         config={"trunk": {"aux_hidden_state_layer_ids": [0, 2]}}),
    # the engine
    Case("trunk 'lora' on Model Runner V1: allowed: Model Runner V2", "layered", runner=1),
    Case("trunk 'backbone' on Model Runner V1: allowed: Model Runner V2", "backbone", runner=1),
    Case("head_dtype=bfloat16: allowed: 'auto'; remove", "backbone", {"head_dtype": "bfloat16"}),
    Case("trunk.heads=3, with tensor_parallel_size=2: allowed: a divisor", "uneven",
         engine={"tensor_parallel_size": 2}),
    Case("Model Runner V1: allowed: Model Runner V2 .. type scripts/v2_on_cpu.sh vllm serve", "o-ptp", runner=1),
    Case("backend='lm-format-enforcer' .. allowed: auto, xgrammar",
         given={"structured_outputs_config.backend": "lm-format-enforcer"}),
    Case("max_model_len 'auto'", "o-ptp", engine={"max_model_len": -1}),
    Case("data_parallel_size on a mixture of experts", "o-ptp", engine={"data_parallel_size": 2}, target=MIXTRAL),
    Case("enable_lora with leaves 'lm_head': allowed: leaves 'own'", "shared", engine={"enable_lora": True}),
    Case("enable_lora with trunk 'mlp', which reads the target's embeddings: allowed: trunk 'none'", "mlp",
         engine={"enable_lora": True}),
    Case("pipeline_parallel_size=2 with trunk 'mlp' .. use tensor_parallel_size", "mlp",
         given={STAGES: 2, ASYNC: True}, runner=2),
    Case("trunk 'lora' and enable_lora", "layered", engine={"enable_lora": True}, runner=2),
    Case("trunk 'lora' and decode_context_parallel_size", "layered", target={"num_key_value_heads": 1},
         engine={"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, runner=2),
    Case("trunk 'lora' and a KV connector that works layer by layer: .. drop", "layered",
         engine={"kv_transfer_config": connector(is_layerwise=True)}, runner=2),
    *[Case(f"trunk 'lora' and {path.rpartition('.')[2]}", "layered", given={path: value, ASYNC: True}, runner=2,
           engine={"kv_transfer_config": connector(is_layerwise=False)})
      for path, value in ((STAGES, 2), ("parallel_config.enable_dbo", True))],
    Case("allowed: Model Runner V2 with asynchronous scheduling; drop --no-async-scheduling",
         given={STAGES: 2, ASYNC: False}, runner=2),
    Case("pipeline_parallel_size=2", engine=PIPELINE),
    Case("pipeline_parallel_size", "o-ptp", engine=PIPELINE),
    Case("enable_lora", "o-ptp", engine={"enable_lora": True}),
    options("'mask_drafts' with method 'ptp'", "o-ptp", mask_drafts=True),
]  # fmt: skip


@pytest.mark.parametrize("case", ENGINES, ids=lambda case: f"{case.head}: {case.wanted[:40]}")
def test_bad_input_is_refused_in_one_line(case: Case, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.model import ModelConfig

    if runner := case.runner or (2 if case.head == "o-ptp" else 0):
        set_runner(monkeypatch, runner)
    if case.target:
        rewrite(place / "target" / "config.json", **case.target)
    if case.config:
        rewrite(place / case.head / "config.json", **case.config)
    for name, value in case.targets.items():
        monkeypatch.setattr(ModelConfig, name, property(lambda self, value=value: value))
    with pytest.raises((MtpcError, ValueError)) as caught:
        config = configured(place, case.head, case.engine, **case.options)
        for path, value in case.given.items():
            section, name = path.split(".")
            object.__setattr__(getattr(config, section), name, value)
        config.speculative_config.check_engine(config)
    message = str(caught.value)
    assert "\n" not in message or not isinstance(caught.value, MtpcError), message  # else it is vLLM's own
    for part in case.wanted.split(" .. "):
        assert part in message


def test_pipeline_stages_are_served_with_asynchronous_scheduling(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_runner(monkeypatch, 2)
    config = configured(place)
    config.parallel_config.pipeline_parallel_size, config.scheduler_config.async_scheduling = 2, True
    config.speculative_config.check_engine(config)


def test_target_with_wider_states_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek V4: vLLM sizes a speculator's buffers by them."""
    from vllm.model_executor.model_loader import utils

    rewrite(place / "target" / "config.json", hc_mult=4)
    configured(place)  # its states have one copy
    wide = type("Model", (), {"get_mtp_target_hidden_states": lambda self: None})
    monkeypatch.setattr(utils, "get_model_cls", lambda target: wide)
    with pytest.raises(MtpcError, match="returns several hidden states per token: allowed: one"):
        configured(place)


def test_too_small_a_cache_is_refused_with_ptp(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_runner(monkeypatch, 2)
    config = configured(place, "o-ptp", {"max_num_seqs": 8})
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32))
    cache = SimpleNamespace(num_blocks=10_000, kv_cache_groups=[group])
    reserved = config.speculative_config.reserved_blocks(config, cache)
    assert reserved > 0
    cache.num_blocks = reserved + 2  # a request of 64 tokens needs 3
    with pytest.raises(MtpcError, match=r"\A[^\n]*max_aux_rows[^\n]*\Z"):
        config.speculative_config.reserved_blocks(config, cache)


# ---- head folders: by loading and by check_tensors, before a tensor is copied ------------------------

WEIGHTS, CONFIG, U_EMBED = "model.safetensors", "config.json", "u_embed.safetensors"
ADAPTER, ADAPTER_WEIGHTS = ADAPTER_FILES
Q_B = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
Q_A = Q_B.replace("lora_B", "lora_A")
NAN, INF = float("nan"), float("inf")
METHODS, VERIFIER = "speculators_config.proposal_methods", "speculators_config.verifier.name_or_path"
LAYER = "transformer_layer_config"
Change = Callable[[Path], Any]


def update_digest(folder: Path) -> None:
    """Make the content of the adapters their only fault."""
    file = folder / (U_EMBED if (folder / U_EMBED).exists() else WEIGHTS)
    if all((folder / name).exists() for name in ADAPTER_FILES):
        with safe_open(file, "pt") as handle:
            metadata = handle.metadata()
        digest = adapter_digest({name: (folder / name).read_bytes() for name in ADAPTER_FILES})
        save_file(load_file(file), file, metadata={**metadata, ADAPTER_DIGEST: digest})


def tensors(file: str, changes: dict[str, Tensor | float | None]) -> Change:
    """Set tensors or, of a number, a tensor's last number; remove those that are None."""

    def change(folder: Path) -> None:
        with safe_open(folder / file, "pt") as handle:
            metadata = handle.metadata()
        found: dict[str, Any] = load_file(folder / file)
        for name, value in changes.items():
            if isinstance(value, float):
                found[name].view(-1)[-1] = value
            else:
                found[name] = value
        save_file({name: value for name, value in found.items() if value is not None}, folder / file, metadata)
        update_digest(folder)

    return change


def edit(file: str, changes: dict[str, Any]) -> Change:
    """Set the values at paths ("a.b.0.c") of a JSON file, or remove those that are `...`."""

    def change(folder: Path) -> None:
        values = json.loads((folder / file).read_text())
        for path, value in changes.items():
            *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
            section: Any = values
            for part in parents:
                section = section[part]
            section[last] = value
            if value is ...:
                del section[last]
        (folder / file).write_text(json.dumps(values))
        if file == ADAPTER:
            update_digest(folder)

    return change


def write(name: str, content: bytes | slice) -> Change:
    """Write a file, or keep a part of its bytes."""
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else (folder / name).read_bytes()[content]
    )


def special(name: str, kind: str) -> Change:
    """Put a pipe, a folder or a link to `kind` in place of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        {"pipe": os.mkfifo, "folder": os.mkdir}.get(kind, lambda file: file.symlink_to(kind))(folder / name)

    return change


def unlink(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def rename(name: str, new: str) -> Change:
    return lambda folder: (folder / name).rename(folder / new)


def config(path: str, value: Any, *words: str) -> tuple[Change, list[str]]:
    return edit(CONFIG, {path: value}), [*words]


UNREADABLE = "not a readable safetensors file"
LARGEST = {"window": 256, "circuit.num_components": 128, "vocab_size": 2**22, "hidden_size": 2**17}
MTPC = [
    (tensors(WEIGHTS, {"inner_bias": None}), ["missing: inner_bias"]),
    (tensors(WEIGHTS, {"extra\n\x1b[2J": torch.zeros(2)}),
     ["extra \\x1b[2J", "inner_bias, inner_weight, leaves.leaf_weight"]),
    (tensors(WEIGHTS, {f"extra.{k}": torch.zeros(1) for k in range(8000)}), ["unknown tensor(s): extra.0"]),
    (tensors(WEIGHTS, {"leaves.leaf_weight": NAN}), ["'leaves.leaf_weight'", "NaN or infinity"]),
    *((tensors(WEIGHTS, {"root_weight": torch.zeros(shape)}), [str(shape), "(2, 4)"]) for shape in ((2, 5), (8,))),
    *((tensors(WEIGHTS, {"root_weight": torch.zeros(2, 4).to(dtype)}), [str(dtype), "float16, bfloat16, float32"])
      for dtype in (torch.int32, torch.float8_e4m3fn)),
    (edit(CONFIG, LARGEST), ["131072"]),  # by shape, without allocating it
    (rename(WEIGHTS, "model@900.pt"), ["model@900.pt", "never loaded", WEIGHTS]),
    (unlink(WEIGHTS), [f"has no {WEIGHTS}"]),
    *((write(WEIGHTS, slice(end)), [UNREADABLE]) for end in (0, 9, -1)),
    (write(WEIGHTS, struct.pack("<Q", MAX_HEADER + 1) + b"{" + b" " * MAX_HEADER), ["a header of"]),
    (lambda folder: torch.save({"leaf_weight": torch.zeros(2)}, folder / WEIGHTS), [UNREADABLE]),
    *((special(WEIGHTS, kind), [WEIGHTS]) for kind in ("pipe", "folder", "/dev/zero")),
    (special(CONFIG, "pipe"), ["not a regular file"]),
    (unlink(CONFIG), [CONFIG, "cannot be read (No such file"]),
    (write(CONFIG, b"[]"), ["a JSON object"]),
    (write(CONFIG, b'{"a": "%s"}' % (b"x" * 300_000)), ["bytes, the most that is allowed"]),
    *((write(CONFIG, text), ["cannot be read as JSON"]) for text in (b"{", b"[" * 100_000, b"9" * 5000)),
    (write(CONFIG, b'{"a": ' * 300 + b"1" + b"}" * 300), ["nested more than"]),
    # values of config.json
    config("window", 1, "'window' = 1", "2"),
    config("vocab_size", 10**18, "vocab_size", "4194304"),
    config("format_version", 7, "format_version = 7", "allowed: 3; install the vllm_mtpc"),
    config("speculators_model_type", ..., "not a head's config"),
    config("window", ..., "'window' is missing"),
    config("windw", 8, "unknown key 'windw'; allowed keys: architectures"),
    config(f"{METHODS}.0.windw", 8, "unknown key", "allowed keys: proposal_type, speculative_tokens; remove it"),
    config(f"{LAYER}.model_type", ["llama"], "model_type' = ['llama']", "string"),
    config("trained_temperature", INF, "'trained_temperature' = 'Infinity'"),
    config("speculators_config.algorithm", "\u202e\x07" * 15_000, "algorithm", "'mtpc' or 'ptp'"),
    config(METHODS, [], METHODS, "[]", "1"),
    config(f"{METHODS}.0.speculative_tokens", 4, "speculative_tokens=4 with window=4", "at most 3"),
    config(VERIFIER, "a\0b", "name_or_path", "should match pattern"),
    config("circuit.kind", "spn", "'spn'", "ff, cp, hmm, btree"),
    config("circuit.kind", "ff", "num_components=2"),
    config("trunk.kind", "tree", "trunk='tree'", "none, mlp, lora, backbone, drafter"),
    config("leaves", 3, "leaves: a section with a kind is expected"),
    config("leaves.expander_rank", 4, "leaves: ", "unknown key", "'expander_rank'"),
    config("trunk", {"kind": "lora", "layers": 3, "rank": 2, "alpha": 2.0}, "trunk: ", "'layers' = 3", "1, 2 or 4"),
    config("draft_vocab_size", 10**7, "draft_vocab_size"),
]  # fmt: skip
ADAPTERS = [  # of draft layers and of a PTP head
    *((unlink(name), [f"has no {name}"]) for name in ADAPTER_FILES),
    *((write(name, b"\xff\xfe{}"), [name]) for name in ADAPTER_FILES),
    (tensors(ADAPTER_WEIGHTS, {Q_B: None}), [f"missing: {Q_B}"]),
    (tensors(ADAPTER_WEIGHTS, {"lm_head.weight": torch.zeros(2)}), ["unknown tensor(s): lm_head.weight"]),
    (tensors(ADAPTER_WEIGHTS, {"base_model.model." + "layers.0." * 8000: torch.zeros(2)}), ["unknown tensor(s)"]),
    (tensors(ADAPTER_WEIGHTS, {Q_A: torch.zeros(3, 8)}), ["(3, 8)", "(2, 8)", "hidden_size"]),
    (tensors(ADAPTER_WEIGHTS, {Q_B: torch.zeros(16)}), ["(16,)", "(any, 2)"]),
    (tensors(ADAPTER_WEIGHTS, {Q_A.replace("q_proj", "qkv_proj"): torch.zeros(2, 8)}), ["adapters of qkv_proj"]),
    (tensors(ADAPTER_WEIGHTS, {Q_A: INF}), ["NaN or infinity", Q_A]),
    (edit(ADAPTER, {"r": 0}), ["'r' = 0", "greater than or equal to 1"]),
    (edit(ADAPTER, {"peft_type": "IA3"}), ["'IA3'", "'LORA'"]),
    (edit(ADAPTER, {"use_rslora": True}), ["'use_rslora' = True"]),
    (edit(ADAPTER, {"alpha_pattern": {"q_proj": 3.0}}), ["alpha_pattern"]),
    (edit(ADAPTER, {"layers_to_transform": [0, 1]}), ["layers_to_transform = [0, 1]; allowed:"]),
]
PTP = [
    *ADAPTERS,
    (rename(U_EMBED, "u_embed.pt"), ["u_embed.pt: pickled weights are never loaded", "save_ptp"]),
    (tensors(U_EMBED, {"outer.bias": None}), [U_EMBED, "missing: outer.bias"]),
    (tensors(U_EMBED, {"outer.bias": torch.zeros(9)}), [U_EMBED, "(9,)", "(8)", "hidden_size"]),
    (edit(ADAPTER, {"lora_alpha": 16}), ["lora_alpha = 16", "lora_alpha=6"]),
    config("lora_rank", 3, "r = 2", "lora_rank=3"),
    config("variant", "c-ptp", "variant 'o-ptp'", "'c-ptp'"),
    config("u_embedding", "ieee", "'u_embedding' = 'ieee'", "train the head again"),
    config("hidden_size", 9, "(9", "hidden_size"),
    config(f"{LAYER}.num_hidden_layers", 4, "layers.3."),
    config("variant", "mtp", "variant", "'mtp'", "'o-ptp', 'c-ptp', 'late' or 'independent'"),
    config("late_width", 3, "late_width=3 with variant 'o-ptp'", "remove it"),
    config("accepted", [0.5, 0.5], "accepted has 2 entries", "window=4"),
    config("accepted", [0.5, 0.2, 0.1, 0.1], "accepted", "sum is 0.9"),
    config(LAYER, {}, "num_hidden_layers is missing"),
]
LATE = [
    (tensors(U_EMBED, {"late.token.weight": None}), ["missing: late.token.weight"]),
    config("distribution_trust", ..., "distribution_trust=None with variant 'late'", "set it"),
]
LAYERS = [
    *ADAPTERS,
    (edit(ADAPTER, {"layers_to_transform": None}), ["layers_to_transform = None", "the last 2 layers"]),
]
HEADS = {"mtpc": MTPC, "layers": LAYERS, "ptp": PTP, "late": LATE}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of each of HEADS, and others of the same shapes in `other`."""
    folder = tmp_path_factory.mktemp("saved")
    for kind in HEADS:
        heads.save(folder / kind, kind)
        heads.save(folder / "other" / kind, kind, seed=1)
    return folder


@pytest.mark.parametrize("kind, change, words", [(kind, *row) for kind, rows in HEADS.items() for row in rows])
def test_bad_head_is_refused(
    tmp_path: Path, saved: Path, kind: str, change: Change, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_mtpc.heads.head.Head.load_state_dict", lambda *_, **__: pytest.fail("loaded"))
    folder = Path(shutil.copytree(saved / kind, tmp_path / "head"))
    change(folder)
    text = head_refusal(folder, kind)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("kind", ["layers", "ptp"])
def test_adapters_of_another_head_are_refused(tmp_path: Path, saved: Path, kind: str) -> None:
    """Of the same shapes: only the digest differs."""
    folder = Path(shutil.copytree(saved / kind, tmp_path / "head"))
    shutil.copy(saved / "other" / kind / ADAPTER_WEIGHTS, folder)
    assert "was saved with" in head_refusal(folder, kind)


def test_undamaged_head_is_loaded(saved: Path) -> None:
    load_head(saved / "mtpc")
