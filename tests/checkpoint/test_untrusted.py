"""Damaged and hostile files: each is read, or refused in one printable line, in time.

tests/proposers/test_bad_input.py has the table of bad heads.
"""

from __future__ import annotations

import json
import random
import re
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import vllm_mtpc
from tests.checkpoint.conftest import contents, save
from tests.proposers.test_bad_input import update_digest
from vllm_mtpc.checkpoint import check_tensors, load_head, load_ptp, read_circuit_config, read_config
from vllm_mtpc.checkpoint.convert.command import convert
from vllm_mtpc.checkpoint.convert.source import ConvertOptions
from vllm_mtpc.checkpoint.load import ADAPTER_FILES
from vllm_mtpc.checkpoint.metadata import read_figures
from vllm_mtpc.errors import CheckpointError, MtpcError, ServeConfigError, printable
from vllm_mtpc.files import MAX_INDEX, MAX_YAML, read_yaml

WORDS = [b"null", b"-1", b"0", b"9" * 18, b"9" * 5000, b"1e999", b"NaN", b'"\\n"', b'"\\ud800"', b"[]", b"{}", b"true"]
DAMAGED = [("mtpc", name) for name in ("config.json", "model.safetensors")]
DAMAGED += [("ptp", name) for name in ("config.json", *ADAPTER_FILES, "u_embed.safetensors")]


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


@pytest.mark.parametrize("kind, name", DAMAGED)
def test_randomly_damaged_file_is_read_or_refused_in_one_line(tmp_path: Path, kind: str, name: str) -> None:
    """Damage to a JSON file or the header of a tensor file, every other one with a matching length and digest."""
    save(tmp_path / "head", kind)
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


def test_head_of_the_other_method_is_refused_and_replaced_whole(tmp_path: Path) -> None:
    save(tmp_path, "ptp")
    for read in (load_head, read_circuit_config):
        with pytest.raises(CheckpointError, match=r'of method ptp; here one of method mtpc.*"method": "ptp"'):
            read(tmp_path)
    save(tmp_path, "mtpc")
    assert contents(tmp_path).keys() == {"config.json", "model.safetensors", "README.md", "provenance.json"}
    with pytest.raises(CheckpointError, match=r'of method mtpc; here one of method ptp.*"method": "mtpc"'):
        load_ptp(tmp_path)
    save(tmp_path, "ptp")
    assert not (tmp_path / "model.safetensors").exists()
    load_ptp(tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": "%s"}' % ("x" * 300_000), None])
def test_unreadable_provenance_is_ignored(folder: Path, content: str | None) -> None:
    (folder / "provenance.json").unlink()
    (folder / "provenance.json").write_text(content) if content else (folder / "provenance.json").mkdir()
    assert read_figures(folder) == {}
    check_tensors(folder, read_config(folder))


MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{k}: &a{k} {{<<: [*a{k - 1}, *a{k - 1}]}}\n" for k in range(1, 40))


@pytest.mark.parametrize(
    "text, words",
    [
        (MERGES, "alias *a0"),  # expands without limit
        ("a0: " + "[" * 5000, "cannot be read"),
        ("".join(f"{' ' * k}a0:\n" for k in range(40)) + " " * 40 + "1", "nested more than"),
        ("# " + "x" * MAX_YAML + "\na0: 1\n", "bytes"),
        ("a0: !!python/object/apply:os.getcwd []", "cannot be read"),
        ("- 1", "a mapping is expected"),
    ],
)
def test_config_yaml_that_grows_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=words.replace("*", r"\*")) as caught:
        read_yaml(tmp_path / "config.yaml")
    # 1.3 s on a processor without AVX-512; what grows without a limit takes minutes
    assert time.process_time() - start < 3.0 and str(caught.value).isprintable()


@pytest.mark.parametrize(
    "weights, config, words",
    [
        ([], {}, "a JSON object"),
        ({}, {}, "has no weight_map"),
        ({"weight_map": {"lm_head.weight": 3}}, {}, "weight_map has 3"),
        ({"weight_map": {"lm_head.weight": "../target/model-1.safetensors"}}, {}, "the name of a file next to it"),
        ({"weight_map": {"lm_head.weight": ".."}}, {}, "not a regular file"),
        ({"weight_map": {"lm_head.weight": "\x1b[2J" * 10_000}}, {}, "the name of a file next to it"),
        ({"weight_map": {"a": "x" * MAX_INDEX}}, {}, "bytes"),
        *(
            (None, {"vocab_size": size}, "lm_head.weight is 6x2 with vocab_size=")
            for size in (None, 0, "3", True, 10**12)
        ),
        (None, {"hidden_size": 3}, "lm_head.weight is 6x2 with vocab_size=3, hidden_size=3"),
    ],
)
def test_target_with_a_bad_index_or_other_sizes_has_no_prediction_heads(
    tmp_path: Path, weights: Any, config: dict[str, Any], words: str
) -> None:
    place = tmp_path / "target"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"vocab_size": 3, "hidden_size": 2, "architectures": ["X"]} | config))
    save_file({"lm_head.weight": torch.zeros(6, 2)}, place / "model-1.safetensors")
    index = {"weight_map": {"lm_head.weight": "model-1.safetensors"}} if weights is None else weights
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    options = ConvertOptions(ckpt=place, target=str(place), out=tmp_path / "out")
    with pytest.raises(CheckpointError) as caught:
        convert(options)
    assert words in str(caught.value) and str(caught.value).isprintable() and not options.out.exists()


@pytest.mark.parametrize("kind", [CheckpointError, ServeConfigError])
def test_long_error_is_shortened_to_a_line(kind: type[MtpcError]) -> None:
    text = str(kind("HEAD: " + "\x1b\n\U000e0001" * 1_000_000 + "type this"))
    assert text.startswith("HEAD: ") and text.endswith("type this") and len(text) <= kind.longest
    assert text.isprintable()
    assert printable("größe 'ü' 漢字", 100) == "größe 'ü' 漢字"
    assert printable("a\x1b[31mb\u202e\ud800", 100) == r"a\x1b[31mb\u202e\ud800"
