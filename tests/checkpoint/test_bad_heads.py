"""Bad heads: each is refused whole, in one line, by loading and by check_tensors."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import vllm_mtpc
from tests.checkpoint.conftest import contents, refusal
from vllm_mtpc.checkpoint import load_head, load_ptp
from vllm_mtpc.checkpoint.load import ADAPTER_DIGEST, ADAPTER_FILES, adapter_digest, read_circuit_config
from vllm_mtpc.errors import CheckpointError, MtpcError
from vllm_mtpc.plots import command as plot_command

WEIGHTS, CONFIG, U_EMBED = "model.safetensors", "config.json", "u_embed.safetensors"
ADAPTER, ADAPTER_WEIGHTS = ADAPTER_FILES
Q_B = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
Q_A = Q_B.replace("lora_B", "lora_A")
DOWN_B = "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"
NAN = float("nan")
Change = Callable[[Path], Any]


def update_digest(folder: Path) -> None:
    """Make the content of the adapters their only fault."""
    file = folder / (U_EMBED if (folder / U_EMBED).exists() else WEIGHTS)
    if not all((folder / name).exists() for name in ADAPTER_FILES):
        return
    with safe_open(file, "pt") as handle:
        metadata = handle.metadata()
    digest = adapter_digest({name: (folder / name).read_bytes() for name in ADAPTER_FILES})
    save_file(load_file(file), file, metadata={**metadata, ADAPTER_DIGEST: digest})


def tensors(file: str, changes: dict[str, Tensor | None]) -> Change:
    """Set tensors, or remove those that are None."""

    def change(folder: Path) -> None:
        with safe_open(folder / file, "pt") as handle:
            metadata = handle.metadata()
        found = {**load_file(folder / file), **changes}
        save_file({name: value for name, value in found.items() if value is not None}, folder / file, metadata)
        update_digest(folder)

    return change


def fill(file: str, name: str, value: float) -> Change:
    """Set the last number of a tensor."""

    def change(folder: Path) -> None:
        found = load_file(folder / file)[name]
        found.view(-1)[-1] = value
        tensors(file, {name: found})(folder)

    return change


def edit(file: str, **changes: Any) -> Change:
    """Set keys of a JSON file, or remove those that are `...`; `drafts`: the number of drafts."""

    def change(folder: Path) -> None:
        values = json.loads((folder / file).read_text()) | changes
        if (drafts := values.pop("drafts", None)) is not None:
            values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = drafts
        (folder / file).write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
        if file == ADAPTER:
            update_digest(folder)

    return change


def write(name: str, content: bytes | slice, end: bytes = b"") -> Change:
    """Write a file, or keep a part of its bytes; `end` follows."""

    def change(folder: Path) -> None:
        kept = content if isinstance(content, bytes) else (folder / name).read_bytes()[content]
        (folder / name).write_bytes(kept + end)

    return change


def format_dtype(dtype: str, bits: int) -> Change:
    """A header with a dtype that only the format has, over zero bytes."""

    def change(folder: Path) -> None:
        entry, start = {}, 0
        for name, tensor in load_file(folder / WEIGHTS).items():
            size = tensor.numel() * bits // 8
            entry[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, start + size]}
            start += size
        text = json.dumps(entry).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + bytes(start))

    return change


def unlink(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def rename(name: str, new: str) -> Change:
    return lambda folder: (folder / name).rename(folder / new)


LARGEST = {"window": 256, "num_components": 128, "vocab_size": 2**22, "hidden_size": 2**17}
UNREADABLE, OTHER_SAVE = "not a readable safetensors file", "was saved with"
MTPC = [
    *((tensors(WEIGHTS, {name: None}), [f"missing: {name}"]) for name in ("leaf_weight", "inner_bias")),
    (tensors(WEIGHTS, {"extra\nbias": torch.zeros(2)}), ["extra bias", "inner_bias, inner_weight, leaf_weight"]),
    (fill(WEIGHTS, "leaf_weight", NAN), ["'leaf_weight'", "NaN or infinity"]),
    (fill(WEIGHTS, "inner_bias", float("-inf")), ["'inner_bias'", "NaN or infinity"]),
    *(  # shapes of as many numbers, too
        (tensors(WEIGHTS, {"root_weight": torch.zeros(shape)}), [str(shape), "(2, 4)"])
        for shape in ((2, 5), (8,), (4, 2), (1, 2, 4))
    ),
    *(
        (edit(CONFIG, **change), [WEIGHTS, "shape"])
        for change in (dict(vocab_size=8), dict(hidden_size=3), dict(window=3, drafts=2), dict(num_components=3))
    ),
    (edit(CONFIG, **LARGEST), ["4194304"]),  # by shape, without allocating it
    (edit(CONFIG, circuit="cp"), ["unknown tensor"]),
    (edit(CONFIG, circuit="hmm"), ["shape"]),
    *(
        (tensors(WEIGHTS, {"root_weight": torch.zeros(2, 4).to(dtype)}), [str(dtype), "float16, bfloat16, float32"])
        for dtype in (torch.int32, torch.bool, torch.float64, torch.float8_e4m3fn)
    ),
    *((format_dtype(*dtype), [WEIGHTS]) for dtype in (("F4", 4), ("F8_E5M2", 8), ("U16", 16), ("C64", 64))),
    (edit(CONFIG, format_version=7), ["7", "allowed: 2"]),
    *(
        (rename(WEIGHTS, name), [name, "never loaded", WEIGHTS])
        for name in ("model@900.pt", "pytorch_model.bin", "head.pth", "last.ckpt")
    ),
    (unlink(WEIGHTS), [f"has no {WEIGHTS}"]),
    *((write(WEIGHTS, slice(end)), [UNREADABLE]) for end in (0, 7, 9, 100, -1)),
    (write(WEIGHTS, slice(None), end=b"\0"), [UNREADABLE]),
    (lambda folder: torch.save({"leaf_weight": torch.zeros(2)}, folder / WEIGHTS), [UNREADABLE]),
    (unlink(CONFIG), [CONFIG, "cannot be read (No such file"]),
    (write(CONFIG, b'{"model_type": "llama"}'), ["not a head's config"]),
    *((write(CONFIG, text), [CONFIG]) for text in (b"[]", b"null", b"{", b"")),
]
ADAPTERS = [  # of draft layers and of a PTP head
    *((unlink(name), [f"has no {name}"]) for name in ADAPTER_FILES),
    *((write(name, content), [name]) for name in ADAPTER_FILES for content in (b"", b"[]", b"{", b"\xff\xfe{}")),
    *((write(ADAPTER_WEIGHTS, slice(end)), [ADAPTER_WEIGHTS]) for end in (100, -1)),
    (tensors(ADAPTER_WEIGHTS, {Q_B: None}), [f"missing: {Q_B}"]),
    (tensors(ADAPTER_WEIGHTS, {"lm_head.weight": torch.zeros(2)}), ["unknown tensor(s): lm_head.weight"]),
    (tensors(ADAPTER_WEIGHTS, {Q_B.replace("s.1", "s.3"): torch.zeros(8, 2)}), ["layers.3"]),
    (tensors(ADAPTER_WEIGHTS, {Q_A: torch.zeros(3, 8)}), ["(3, 8)", "(2, 8)", "hidden_size"]),
    (tensors(ADAPTER_WEIGHTS, {Q_B: torch.zeros(16)}), ["(16,)", "(any, 2)"]),
    (tensors(ADAPTER_WEIGHTS, {DOWN_B: torch.zeros(12, 2)}), ["(12, 2)", "(8, 2)"]),
    (tensors(ADAPTER_WEIGHTS, {Q_A: torch.zeros(2, 8).int()}), ["int32"]),
    (tensors(ADAPTER_WEIGHTS, {Q_A.replace("q_proj", "qkv_proj"): torch.zeros(2, 8)}), ["adapters of qkv_proj"]),
    (fill(ADAPTER_WEIGHTS, Q_A, float("inf")), ["NaN or infinity", Q_A]),
    (edit(ADAPTER, r=0), ["'r' = 0", "greater than or equal to 1"]),
    (edit(ADAPTER, r=3), ["(2, ", "(3, "]),
    (edit(ADAPTER, peft_type="IA3"), ["'IA3'", "'LORA'"]),
    (edit(ADAPTER, use_rslora=True), ["'use_rslora' = True"]),
    (edit(ADAPTER, alpha_pattern={"q_proj": 3.0}), ["alpha_pattern"]),
    (edit(ADAPTER, layers_to_transform=[0, 1]), ["layers_to_transform = [0, 1]; allowed:"]),
]
LAYERS = [
    *ADAPTERS,
    (edit(ADAPTER, layers_to_transform=[2]), ["layers_to_transform = [2]", "[1, 2], the last 2 layers"]),
    (edit(ADAPTER, layers_to_transform=None), ["layers_to_transform = None"]),
]
PTP = [
    *ADAPTERS,
    (unlink(U_EMBED), [U_EMBED]),
    (rename(U_EMBED, "u_embed.pt"), ["u_embed.pt: pickled weights are never loaded", "save_ptp"]),
    (tensors(U_EMBED, {"outer.bias": None}), [U_EMBED, "missing: outer.bias"]),
    (tensors(U_EMBED, {"more": torch.zeros(2)}), [U_EMBED, "unknown", "more", "outer.bias, outer.weight"]),
    (tensors(U_EMBED, {"outer.bias": torch.zeros(9)}), [U_EMBED, "(9,)", "(8)", "hidden_size"]),
    (tensors(U_EMBED, {"outer.bias": torch.zeros(8).int()}), [U_EMBED, "int32", "float16"]),
    (fill(U_EMBED, "outer.weight", NAN), [U_EMBED, "NaN", "'outer.weight'"]),
    (edit(ADAPTER, lora_alpha=16), ["lora_alpha = 16", "lora_alpha=6"]),
    (edit(CONFIG, lora_rank=3), ["r = 2", "lora_rank=3"]),
    (edit(CONFIG, variant="c-ptp"), ["variant 'o-ptp'", "'c-ptp'"]),
    (edit(CONFIG, u_embedding="threshold", u_features=32), ["u_embedding 'ieee'", "'threshold'"]),
    (edit(CONFIG, hidden_size=9), ["(9", "hidden_size"]),
    (edit(CONFIG, circuit="cp"), ["unknown key 'circuit'", "u_embedding"]),
    (edit(CONFIG, transformer_layer_config={"num_hidden_layers": 4}), ["layers.3."]),
]
LATE = [
    (tensors(U_EMBED, {"late.token.weight": None}), ["missing: late.token.weight"]),
    (tensors(U_EMBED, {"late.state.bias": torch.zeros(4)}), [U_EMBED, "(4,)", "(8)", "late_width"]),
    (fill(U_EMBED, "late.outer.weight", NAN), ["NaN", "'late.outer.weight'"]),
    (edit(CONFIG, late_width=..., distribution_trust=..., variant="independent"), ["variant 'late'", "'independent'"]),
]
TABLE = {"mtpc": MTPC, "layers": LAYERS, "ptp": PTP, "late": LATE}
CASES = [(kind, *case) for kind, cases in TABLE.items() for case in cases]


@pytest.mark.parametrize("kind, change, words", CASES)
def test_bad_head_is_refused(tmp_path: Path, save_kind, kind: str, change: Change, words: list[str]) -> None:
    save_kind(tmp_path / "head", kind)
    change(tmp_path / "head")
    text = refusal(tmp_path / "head", kind)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("kind", ["layers", "ptp"])
def test_adapters_of_another_head_are_refused(tmp_path: Path, save_kind, kind: str) -> None:
    """Of the same shapes: only the digest differs."""
    save_kind(tmp_path / "head", kind)
    save_kind(tmp_path / "other", kind, seed=1)
    shutil.copy(tmp_path / "other" / ADAPTER_WEIGHTS, tmp_path / "head")
    assert OTHER_SAVE in refusal(tmp_path / "head", kind)


def test_head_of_the_other_method_is_refused_and_replaced_whole(tmp_path: Path, save_kind) -> None:
    save_kind(tmp_path, "ptp")
    for read in (load_head, read_circuit_config, lambda place: plot_command.read(str(place))):
        with pytest.raises(CheckpointError, match=r'of method ptp; here one of method mtpc.*"method": "ptp"'):
            read(tmp_path)
    save_kind(tmp_path, "mtpc")
    assert contents(tmp_path).keys() == {CONFIG, WEIGHTS, "README.md", "provenance.json"}
    with pytest.raises(CheckpointError, match=r'of method mtpc; here one of method ptp.*"method": "mtpc"'):
        load_ptp(tmp_path)
    save_kind(tmp_path, "ptp")
    assert not (tmp_path / WEIGHTS).exists()
    load_ptp(tmp_path)


def test_nothing_is_half_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(WEIGHTS, "root_weight", NAN)(folder)
    monkeypatch.setattr("vllm_mtpc.heads.linear.LinearHead.load_state_dict", lambda *_, **__: pytest.fail("loaded"))
    refusal(folder, "mtpc")


WORDS = [b"null", b"-1", b"0", b"9" * 18, b"9" * 5000, b"1e999", b"NaN", b'"\\n"', b'"\\ud800"', b"[]", b"{}", b"true"]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four changes: a byte replaced or inserted, a piece cut or doubled, a value replaced."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.randint(1, 20))
        changes = [data[:at] + rng.randbytes(1) + data[kept:] for kept in (at, at + 1)]
        changes += [data[:at] + data[end:], data[:end] + data[at:]]
        if values := list(re.finditer(rb'-?\d+(?:\.\d+)?|"[^"]*"', data)):
            value = rng.choice(values)
            changes += [data[: value.start()] + rng.choice(WORDS) + data[value.end() :]] * 2
        data = rng.choice(changes) or b"x"
    return data


DAMAGED = [("mtpc", CONFIG), ("mtpc", WEIGHTS), *(("ptp", name) for name in (CONFIG, *ADAPTER_FILES, U_EMBED))]


@pytest.mark.parametrize("kind, name", DAMAGED)
def test_randomly_damaged_file_is_read_or_refused_in_one_line(tmp_path: Path, save_kind, kind: str, name: str) -> None:
    """Damage to a JSON file or the header of a tensor file, every other one with a matching length and digest."""
    save_kind(tmp_path / "head", kind)
    folder, rng, loaded, rounds = tmp_path / "head", random.Random(0), 0, 80
    whole = contents(folder)
    original = whole[name]
    start, end = (0, len(original)) if name.endswith("json") else (8, 8 + struct.unpack("<Q", original[:8])[0])
    for turn in range(rounds):
        for other, data in whole.items():
            (folder / other).write_bytes(data)
        changed = mutate(original[start:end], rng)
        length = struct.pack("<Q", len(changed)) if turn % 2 else original[:8]
        (folder / name).write_bytes(length[:start] + changed + original[end:])
        if name in ADAPTER_FILES and turn % 2:
            update_digest(folder)
        vllm_mtpc.has_heads(folder)
        try:
            (load_head if kind == "mtpc" else load_ptp)(folder)
            loaded += 1
        except MtpcError as error:
            assert len(str(error).splitlines()) == 1
    assert loaded < rounds / 2  # the changes do damage


PLACES = ("config", "weights", "folder", "parent", "bundled")
# The first look imports everything: the other user may not be allowed to read this package. Root may read everything.
CODE = """
import os, sys
from vllm_mtpc.checkpoint import check_tensors, read_config, resolve_head
from vllm_mtpc.cli import guard
def check(place):
    folder = resolve_head(place)
    check_tensors(folder, read_config(folder))
    return 0
good, *places = sys.argv[1:]
assert check(good) == 0
if os.geteuid() == 0:
    os.setuid(65534)
for place in places:
    print(place, guard("vllm-mtpc", lambda: check(place)), file=sys.stderr)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(folder)


def test_missing_permission_is_one_line(folder: Path, open_folder: Path) -> None:
    places = {name: Path(shutil.copytree(folder, open_folder / name / "head")) for name in ("good", *PLACES)}
    places["bundled"] = places["bundled"].rename(open_folder / "bundled" / "mtpc").parent
    closed = [places["config"] / CONFIG, places["weights"] / WEIGHTS, places["folder"], places["parent"].parent]
    for path in (*closed, places["bundled"] / "mtpc"):
        path.chmod(0)
    command = [sys.executable, "-c", CODE, *map(str, places.values())]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env={**os.environ, "HOME": "/"})
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and len(lines) == 2 * len(PLACES), done.stderr
    for name, message, result in zip(PLACES, lines[::2], lines[1::2], strict=True):
        assert message.startswith("vllm-mtpc: error: ") and str(places[name]) in message
        assert result == f"{places[name]} 1"
        assert "Permission denied" in message or name != "folder"
