"""Files that would hang a reader or exhaust its memory: each is refused in time, in one short, printable line."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vllm_mtpc
from vllm_mtpc.checkpoint import check_tensors, load_head, read_config
from vllm_mtpc.checkpoint.convert.command import convert
from vllm_mtpc.checkpoint.convert.mtpc_checkpoint import sort_tensors
from vllm_mtpc.checkpoint.convert.source import ConvertOptions
from vllm_mtpc.checkpoint.metadata import measured_acceptance
from vllm_mtpc.cli import guard
from vllm_mtpc.errors import CheckpointError, MtpcError, ServeConfigError, printable
from vllm_mtpc.files import MAX_HEADER, MAX_INDEX, MAX_JSON, MAX_YAML, open_tensors, read_yaml

SECONDS = 1.0  # of this process: other work on the machine does not count
HANGS = 30  # seconds by the clock after which a call hangs
WEIGHTS = "model.safetensors"


class Hung(BaseException):
    """Raised in a call that does not return; readers catch no BaseException."""


@pytest.fixture(autouse=True)
def clock() -> Iterator[None]:
    """A call that hangs is ended; garbage of other tests does not count."""

    def hung(*_: Any) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANGS)
    gc.disable()
    yield
    gc.enable()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refusal(call: Callable[[], object]) -> str:
    """The line that `call` is refused with, in time."""
    start = time.process_time()
    with pytest.raises(MtpcError) as caught:
        call()
    assert time.process_time() - start < SECONDS
    text = str(caught.value)
    assert len(text) < 500 and text.isprintable(), text
    return text


def check_head(folder: Path) -> int:
    check_tensors(folder, read_config(folder))
    return 0


def printed_refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """`refusal` of the checks of a head, as a command prints it."""

    def call() -> None:
        assert guard("vllm-mtpc", lambda: check_head(folder)) == 1
        raise MtpcError(capsys.readouterr().err.removesuffix("\n"))

    return refusal(call)


def no_file(file: Path, kind: str) -> None:
    """Something at `file` that is not a regular file."""
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.path.relpath(file))  # a socket's path has 108 characters at most
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(kind)


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "/dev/zero", "/dev/tty", "/proc/kmsg", "loop"])
def test_special_file_is_refused(folder: Path, kind: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """In place of the provenance, which loading does not need, it is ignored."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    kind = str(tmp_path / "loop") if kind == "loop" else kind
    no_file(folder / "provenance.json", kind)
    assert measured_acceptance(folder) == {}
    check_head(folder)
    no_file(folder / WEIGHTS, kind)
    refusal(lambda: load_head(folder))
    printed_refusal(folder, capsys)
    no_file(folder / "config.json", kind)
    assert not vllm_mtpc.has_heads(folder)
    refusal(lambda: read_config(folder))
    printed_refusal(folder, capsys)
    refusal(lambda: read_yaml(folder / "config.json"))


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


CONFIGS: dict[str, tuple[str | dict[Any, Any], str]] = {  # a whole file, or keys of it
    "30-MB": ('{"a": "%s"}' % ("x" * 30_000_000), "bytes"),
    "deep": ("[" * 100_000, "cannot be read as JSON"),
    "deep-objects": (nested(300), "nested more than"),
    "digits": ('{"window": %s}' % ("9" * 5000), "cannot be read as JSON"),
    "escapes": ({"circuit": "\x1b[2J" * 20_000}, "unknown circuit"),
    "key": ({"x" * 200_000: 1}, "unknown key"),
    "keys": ({f"{k:x}": 1 for k in range(20_000)}, "unknown key"),
    "bidi": ({"speculators_config": {"algorithm": "\u202e\x07" * 15_000}}, "speculators_config"),
    "list": ({"architectures": [[0]] * 40_000}, "architectures"),
    "layers": ({"transformer_layer_config": {"num_hidden_layers": "9" * 200_000}}, "num_hidden_layers"),
    "sizes": ({"transformer_layer_config": {f"{k}": 1 for k in range(18_000)}}, "unknown '0'"),
    "float": ({"window": 1e300}, "window"),
    "methods": ({"speculators_config": {"proposal_methods": [1] * 40_000}}, "speculators_config"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_with_odd_content_is_refused(folder: Path, name: str, capsys) -> None:
    (content, words), file = CONFIGS[name], folder / "config.json"
    whole = content if isinstance(content, str) else json.dumps(json.loads(file.read_text()) | content)
    file.write_text(whole)
    assert words in refusal(lambda: read_config(folder))
    if whole == content:
        (folder / "provenance.json").write_text(whole)
        assert measured_acceptance(folder) == {} and not vllm_mtpc.has_heads(folder)
    else:
        assert file.stat().st_size < MAX_JSON
    printed_refusal(folder, capsys)


def tensors(folder: Path, *names: str) -> None:
    """The head's weights, with more tensors of these names."""
    save_file({**load_file(folder / WEIGHTS), **{name: torch.zeros(1) for name in names}}, folder / WEIGHTS)


@pytest.mark.parametrize(
    "names, words",
    [
        (["base_model.model." + "layers.0." * 8000], "a tensor's name of 72,017 characters"),
        (["\x1b[2J\x1b]0;title\x07"], "unknown tensor(s): \\x1b[2J"),
        ([f"extra.{k}" for k in range(8_000)], "unknown tensor(s): extra.0"),
        (["a\u2028b\r\nc"], "unknown tensor(s): a b c"),
    ],
    ids=["72-KB", "escapes", "many", "lines"],
)
def test_odd_tensor_name_is_refused(folder: Path, names: list[str], words: str, capsys) -> None:
    tensors(folder, *names)
    config = read_config(folder)
    assert words in refusal(lambda: check_tensors(folder, config))
    assert words in printed_refusal(folder, capsys)


def test_long_adapter_name_is_refused_before_it_is_matched(folder: Path) -> None:
    name = "base_model.model." + "layers.0." * 8000
    file = folder / "adapter_model.safetensors"
    save_file({name: torch.zeros(1)}, file)
    assert "72,017 characters" in refusal(lambda: open_tensors(file).__enter__())
    assert "characters" in refusal(lambda: sort_tensors(file, {f"lm.{name}.lora_A.weight": torch.zeros(1)}))


def test_oversized_header_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", MAX_HEADER + 1) + b"{" + b" " * MAX_HEADER)
    assert "a header of" in refusal(lambda: load_head(folder))


ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 40))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{k}: &a{k} {{<<: [*a{k - 1}, *a{k - 1}]}}\n" for k in range(1, 40))
YAML = {
    "aliases": (ALIASES, "alias *a0"),
    "merges": (MERGES, "alias *a0"),
    "deep": ("a0: " + "[" * 15_000, "nested more than"),
    "deep-blocks": ("a0:\n" + "- " * 10_000, "cannot be read"),
    "deep-keys": ("? " * 10_000, "cannot be read"),
    "deep-mappings": ("".join(f"{' ' * k}a0:\n" for k in range(40)) + " " * 40 + "1", "nested more than"),
    "flow": ("a0: {" * 5000, "cannot be read"),
    "large": ("# " + "x" * MAX_YAML + "\na0: 1\n", "bytes"),
    "digits": ("a0: " + "9" * 5000, "cannot be read"),
    "tag": ("a0: !!python/object/apply:os.getcwd []", "cannot be read"),
    "escapes": ("a0: \x1b[2J", "cannot be read"),
    "list": ("- 1", "config.yaml"),
    "empty": ("", "config.yaml"),
    "zero": ("\x00", "config.yaml"),
}


@pytest.mark.parametrize("name", YAML)
def test_config_yaml_that_grows_is_refused(tmp_path: Path, name: str) -> None:
    text, words = YAML[name]
    (tmp_path / "config.yaml").write_text(text)
    assert words in refusal(lambda: read_yaml(tmp_path / "config.yaml"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target with two heads of three tokens."""
    place = tmp_path / "target"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"vocab_size": 3, "hidden_size": 2, "architectures": ["X"]}))
    save_file({"lm_head.weight": torch.zeros(6, 2)}, place / "model-1.safetensors")
    index(place, {"weight_map": {"lm_head.weight": "model-1.safetensors"}})
    return place


def index(target: Path, values: Any) -> None:
    (target / "model.safetensors.index.json").write_text(json.dumps(values))


def token_heads(target: Path) -> str:
    options = ConvertOptions(ckpt=target, target=str(target), out=target.parent / "out")
    text = refusal(lambda: convert(options))
    assert not options.out.exists()
    return text


@pytest.mark.parametrize(
    "values, words",
    [
        ([], "a JSON object"),
        ({}, "has no weight_map"),
        ({"weight_map": ["lm_head.weight"]}, "has no weight_map"),
        ({"weight_map": {"lm_head.weight": 3}}, "weight_map has 3"),
        ({"weight_map": {"lm_head.weight": "/etc/passwd"}}, "the name of a file next to it"),
        ({"weight_map": {"lm_head.weight": "../target/model-1.safetensors"}}, "the name of a file next to it"),
        ({"weight_map": {"lm_head.weight": ".."}}, "not a regular file"),
        ({"weight_map": {"lm_head.weight": "\x1b[2J" * 10_000}}, "the name of a file next to it"),
        ({"weight_map": {"lm_head.weight": "a\0b"}}, "the name of a file next to it"),
        ({"weight_map": {"a": "x" * MAX_INDEX}}, "bytes"),
        ({"weight_map": json.loads(nested(100))}, "nested more than"),
    ],
)
def test_malformed_index_is_refused(target: Path, values: Any, words: str) -> None:
    index(target, values)
    assert words in token_heads(target)


@pytest.mark.parametrize(
    "vocab_size, shape",
    [
        *((size, (6, 2)) for size in (None, 0, -3, "3", [3], 3.0, True, 10**12)),
        *((3, shape) for shape in ((), (6,), (6, 2, 1), (0, 2))),
    ],
)
def test_prediction_heads_of_other_sizes_are_refused(target: Path, vocab_size: Any, shape: tuple[int, ...]) -> None:
    (target / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "hidden_size": 2}))
    save_file({"lm_head.weight": torch.zeros(shape)}, target / "model-1.safetensors")
    assert f"lm_head.weight is {'x'.join(map(str, shape))} with vocab_size=" in token_heads(target)


@pytest.mark.parametrize("kind", [CheckpointError, ServeConfigError])
def test_long_error_is_shortened_to_a_line(kind: type[MtpcError]) -> None:
    text = str(kind("HEAD: " + "\x1b\n\U000e0001" * 1_000_000 + "type this"))
    assert text.startswith("HEAD: ") and text.endswith("type this") and len(text) <= kind.longest
    assert text.isprintable()


def test_printable_text_is_unchanged() -> None:
    assert printable("größe 'ü' 漢字", 100) == "größe 'ü' 漢字"
    assert printable("a\x1b[31mb\u202e\ud800", 100) == r"a\x1b[31mb\u202e\ud800"
    assert printable("x" * 50 + "y" * 51, 100) == "x" * 45 + " ... " + "y" * 50


def test_path_in_a_system_error_is_made_printable(capsys) -> None:
    def call() -> int:
        raise FileNotFoundError(2, "No such file", "a\x1b[2J" * 1000)

    assert guard("x", call) == 1
    text = capsys.readouterr().err.removesuffix("\n")
    assert len(text) < 500 and text.isprintable()
