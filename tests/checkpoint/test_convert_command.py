"""`vllm-mtpc convert` finds checkpoints in files, folders and on the hub, and never runs pickled code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.hf_api import ModelInfo

from tests.support import authors_mtpc as authors
from tests.support import drafters
from tests.support.adapted import LLAMA
from tests.support.convert_cases import convert, refusal
from tests.support.models import make_target
from vllm_mtpc.checkpoint.inspect import inspect_head
from vllm_mtpc.cli import main

torch.set_num_threads(1)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    LLAMA.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def mtpc_checkpoint(folder: Path) -> Path:
    return authors.save(folder / "run", authors.state_dict("cp", 3, 2, 7, 8), "cp", 3, 2, 7, 8)


@pytest.mark.parametrize("kind", ["mtpc", "drafter"])
def test_hub_name_is_downloaded_at_one_commit(tmp_path, target, capsys, monkeypatch, kind):
    if kind == "mtpc":
        folder, names = mtpc_checkpoint(tmp_path).parent, ["config.yaml", "model@100.pt", "model@900.pt"]
        files, label = ["model@900.pt", "config.yaml"], "someone/a-head@c0ffee/model@900.pt"
    else:
        folder, names = (
            drafters.make(tmp_path / "drafter", "speculators dflash", make_target(target, 48, 0, layers=4)),
            [
                "config.json",
                "model@x.bin",
            ],
        )
        files, label = (
            ["config.json", "*.safetensors", "*.safetensors.index.json", "mask_embedding.pt"],
            "someone/a-head@c0ffee",
        )
    asked: list[Any] = []

    def download(repo: str, revision: str, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "someone/a-head: not a local file or folder, and cannot be downloaded" in refusal(
        "someone/a-head", target, capsys
    )
    info = ModelInfo(id="someone/a-head", sha="c0ffee", siblings=[{"rfilename": name} for name in names])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repo: info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    out = convert("someone/a-head", target)
    assert asked == [("someone/a-head", "c0ffee", files)]
    assert inspect_head(out)["provenance"]["converted"]["from"] == label


def test_missing_files_other_folders_and_foreign_flags_are_refused(tmp_path, target, capsys):
    file, before = mtpc_checkpoint(tmp_path), (target / "config.json").read_bytes()
    text = refusal(file, target, capsys, "--variant", "c-ptp", "--window", 4)
    assert "--variant, --window: for PTP checkpoints only" in text
    assert "architectures" in refusal(target, target, capsys)  # a model, but no drafter
    assert main(["convert", str(file), "--target", str(target), "--out", str(target)]) == 1
    assert "another model's config.json" in capsys.readouterr().err
    assert (target / "config.json").read_bytes() == before
    file.unlink()
    assert "has no model@STEP.pt and no config.json" in refusal(file.parent, target, capsys)
    assert "is not a file" in refusal(file, target, capsys)


class Planted:
    """Leaves a file if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "a.ckpt"),
        (b"not a checkpoint", "a.ckpt"),
        (b"PK\x03\x04", "a.ckpt"),
        ([], "'state_dict'"),
        ({"weights": {}}, "'state_dict'"),
        ({"state_dict": 3}, "'state_dict'"),
        ({"state_dict": {}, "model_state_dict": {}}, "'state_dict' and 'model_state_dict'"),
        ({"state_dict": {}, "callbacks": Planted}, "tensors alone"),
        ({"model_state_dict": {"mt_head.planted": Planted}}, "tensors alone"),
    ],
)
def test_other_file_is_refused_and_never_unpickled(tmp_path, target, capsys, content, words):
    file, ran = tmp_path / "a.ckpt", tmp_path / "ran"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save({"planted": Planted(ran), "content": content} if words == "tensors alone" else content, file)
    assert words in refusal(file, target, capsys)
    assert not ran.exists()
    if words == "tensors alone":
        torch.load(file, weights_only=False)
        assert ran.exists()  # the control
