"""Bad MtPC heads: each is refused whole, in one line, by load_head, check_tensors and `inspect`."""

from __future__ import annotations

import json
import os
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
from safetensors.torch import load_file, save_file

from vllm_mtpc.checkpoint import check_tensors, load_head, read_config
from vllm_mtpc.checkpoint.inspect import inspect_head
from vllm_mtpc.cli import main
from vllm_mtpc.errors import MtpcError

WEIGHTS = "model.safetensors"
Change = Callable[[Path], Any]


def refusal(folder: Path) -> str:
    """The one line of all readers."""
    lines = []
    for read in (load_head, lambda place: check_tensors(place, read_config(place)), inspect_head):
        with pytest.raises(MtpcError) as caught:
            read(folder)
        lines.append(str(caught.value))
    assert len(set(lines)) == 1 and "\n" not in lines[0] and str(folder) in lines[0]
    return lines[0]


def tensors(**changes: Any) -> Change:
    """Set tensors, or remove those that are None."""

    def change(folder: Path) -> None:
        found = {**load_file(folder / WEIGHTS), **changes}
        save_file({name: value for name, value in found.items() if value is not None}, folder / WEIGHTS)

    return change


def fill(name: str, value: float) -> Change:
    """Set the last number of a tensor."""

    def change(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        found[name].view(-1)[-1] = value
        save_file(found, folder / WEIGHTS)

    return change


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        drafts = changes.pop("drafts", None)
        if drafts is not None:  # with a smaller window
            values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = drafts
        (folder / "config.json").write_text(json.dumps(values | changes))

    return change


def write(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def truncate(keep: Callable[[int, int], int]) -> Change:
    def change(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[: keep(struct.unpack("<Q", data[:8])[0], len(data))])

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


def folder_in_place(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


LARGEST = {"window": 256, "num_components": 4096, "vocab_size": 2**22, "hidden_size": 2**17}
UNREADABLE = "not a readable safetensors file"
CASES: dict[str, tuple[Change, list[str]]] = {
    **{f"no-{name}": (tensors(**{name: None}), [f"missing: {name}"]) for name in ("leaf_weight", "inner_bias")},
    "extra": (
        tensors(**{"extra\nbias": torch.zeros(2)}),
        ["extra bias", "inner_bias, inner_weight, leaf_weight, root_weight"],
    ),
    "nan": (fill("leaf_weight", float("nan")), ["'leaf_weight'", "NaN or infinity"]),
    "inf": (fill("inner_bias", float("-inf")), ["'inner_bias'", "NaN or infinity"]),
    "shape": (tensors(root_weight=torch.zeros(2, 5)), ["'root_weight'", "(2, 5)", "(2, 4)"]),
    **{
        f"same-size-{len(shape)}-{shape[0]}": (tensors(root_weight=torch.zeros(shape)), [str(shape)])
        for shape in ((8,), (4, 2), (1, 2, 4))
    },
    "vocab": (config(vocab_size=8), [WEIGHTS, "shape"]),
    "hidden": (config(hidden_size=3), [WEIGHTS, "shape"]),
    "window": (config(window=3, drafts=2), [WEIGHTS, "shape"]),
    "components": (config(num_components=3), [WEIGHTS, "shape"]),
    "largest-sizes": (config(**LARGEST), ["4194304"]),  # by shape, without allocating it
    "cp": (config(circuit="cp"), ["unknown tensor"]),
    "hmm": (config(circuit="hmm"), ["shape"]),
    **{
        str(dtype): (tensors(root_weight=torch.zeros(2, 4).to(dtype)), [str(dtype), "float16, bfloat16, float32"])
        for dtype in (torch.int32, torch.bool, torch.float64, torch.float8_e4m3fn)
    },
    **{name: (format_dtype(name, bits), []) for name, bits in (("F4", 4), ("F8_E5M2", 8), ("U16", 16), ("C64", 64))},
    "version": (config(format_version=7), ["7", "formats 1 and 2"]),
    **{
        name: (lambda folder, name=name: (folder / WEIGHTS).rename(folder / name), [name, "never loaded", WEIGHTS])
        for name in ("model@900.pt", "pytorch_model.bin", "head.pth", "last.ckpt")
    },
    "no-weights": (lambda folder: (folder / WEIGHTS).unlink(), [f"has no {WEIGHTS}"]),
    "folder-weights": (folder_in_place, [WEIGHTS]),
    **{
        f"truncated-{number}": (truncate(keep), [UNREADABLE])
        for number, keep in enumerate(
            [
                lambda header, size: 0,
                lambda header, size: 7,
                lambda header, size: 9,
                lambda header, size: 8 + header // 2,
                lambda header, size: 8 + header,
                lambda header, size: size - 1,
            ]
        )
    },
    "longer": (lambda folder: write(WEIGHTS, (folder / WEIGHTS).read_bytes() + b"\0")(folder), [UNREADABLE]),
    "pickle": (lambda folder: torch.save({"leaf_weight": torch.zeros(2)}, folder / WEIGHTS), [UNREADABLE]),
    "no-config": (lambda folder: (folder / "config.json").unlink(), ["has no config.json"]),
    "target": (write("config.json", b'{"model_type": "llama"}'), ["not a head's config"]),
    **{f"config-{text}": (write("config.json", text.encode()), ["config.json"]) for text in ("[]", "null", "{", "")},
}


@pytest.mark.parametrize("name", CASES)
def test_bad_head_is_refused(folder: Path, name: str) -> None:
    load_head(folder)
    change, words = CASES[name]
    change(folder)
    text = refusal(folder)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("name", ["nowhere", WEIGHTS])
def test_path_that_is_not_a_folder_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(MtpcError, match=r"has no config\.json"):
        load_head(folder / name)


def test_nothing_is_half_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill("root_weight", float("nan"))(folder)
    monkeypatch.setattr("vllm_mtpc.heads.linear.LinearHead.load_state_dict", lambda *_, **__: pytest.fail("loaded"))
    refusal(folder)


# ---- permissions ----------------------------------------------------------------------------------

PLACES = ("config", "weights", "folder", "parent", "bundled")
# The first look imports everything: the other user may not be allowed to read this package. Root may read everything.
CODE = """
import os, sys
from vllm_mtpc.cli import main
good, *places = sys.argv[1:]
assert main(["inspect", good]) == 0
if os.geteuid() == 0:
    os.setuid(65534)
for place in places:
    print(place, main(["inspect", place]), file=sys.stderr)
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
    shut = {
        "config": places["config"] / "config.json",
        "weights": places["weights"] / WEIGHTS,
        "folder": places["folder"],
        "parent": places["parent"].parent,
        "bundled": places["bundled"] / "mtpc",
    }
    for path in shut.values():
        path.chmod(0)
    command = [sys.executable, "-c", CODE, *map(str, places.values())]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env={**os.environ, "HOME": "/"})
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * len(PLACES), done.stderr
    for place, message, result in zip(list(places.values())[1:], lines[::2], lines[1::2], strict=True):
        assert message.startswith("vllm-mtpc: error: ") and str(place) in message
        assert result == f"{place} 1"
    assert "chmod -R a+rX" in lines[2 * PLACES.index("folder")]


def test_offline_hub_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["inspect", "vllm-mtpc-tests/no-such-head"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("vllm-mtpc: error: no head at 'vllm-mtpc-tests/no-such-head': not a local folder")
    assert text.count("\n") == 1
