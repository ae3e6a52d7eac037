"""`vllm-mtpc convert` finds files, folders and hub names, and runs no pickles."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch

from tests.checkpoint.conftest import convert, convert_refusal, converted_from
from tests.support import authors_mtpc as authors
from tests.support import drafters
from tests.support.models import make_target
from vllm_mtpc.cli import main

torch.set_num_threads(1)


def test_hub_name_is_downloaded_at_one_commit(tmp_path, target, capsys, monkeypatch):
    folder = drafters.make(tmp_path / "c0ffee", "speculators dflash", make_target(target, 48, 0, layers=4))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = convert_refusal("someone/a-head", target, capsys)
    assert "no checkpoint at 'someone/a-head': not a local folder, and the hub gave no such repository" in text
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(folder))
    assert converted_from(convert("someone/a-head", target))["from"] == "someone/a-head@c0ffee"


def test_missing_files_and_other_folders_are_refused(tmp_path, target, capsys):
    file = authors.save(tmp_path / "run", authors.state_dict("cp", 3, 2, 7, 8), "cp", 3, 2, 7, 8)
    before = (target / "config.json").read_bytes()
    assert "model.safetensors" in convert_refusal(target, target, capsys)  # a model without weights
    other = shutil.copytree(target, tmp_path / "other")
    assert "architectures" in convert_refusal(other, target, capsys)  # a model, but no drafter
    assert main(["convert", str(file), "--target", str(target), "--out", str(target)]) == 1
    assert "another model's config.json" in capsys.readouterr().err
    assert (target / "config.json").read_bytes() == before
    file.unlink()
    for place in (file.parent, file):
        assert f"{place}: no checkpoint; name a model@STEP.pt" in convert_refusal(place, target, capsys)


class Planted:
    """Leaves a file if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    "content, words",
    [
        (b"PK\x03\x04", "a.ckpt"),
        ({"state_dict": {}}, "has no dict 'model_state_dict'"),
        ({"model_state_dict": []}, "has no dict 'model_state_dict'"),
        ({"model_state_dict": {}, "callbacks": Planted}, "tensors alone"),
        ({"model_state_dict": {"mt_head.planted": Planted}}, "tensors alone"),
    ],
)
def test_other_file_is_refused_and_never_unpickled(tmp_path, target, capsys, content, words):
    file, ran = tmp_path / "a.ckpt", tmp_path / "ran"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save({"planted": Planted(ran), "content": content} if words == "tensors alone" else content, file)
    assert words in convert_refusal(file, target, capsys)
    assert not ran.exists()
    if words == "tensors alone":
        torch.load(file, weights_only=False)
        assert ran.exists()  # the control
