"""Finding heads: has_heads, folders, hub names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

import vllm_mtpc
from vllm_mtpc.checkpoint import find_head, resolve_head, resolve_verifier
from vllm_mtpc.checkpoint.locate import verifier_name
from vllm_mtpc.errors import CheckpointError


def refusal(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and len(text) < 500
    return text


def test_heads_are_found_in_head_and_target_folders(folder, tmp_path):
    assert vllm_mtpc.has_heads(folder) and vllm_mtpc.has_heads(str(folder))
    assert find_head(folder) == resolve_head(str(folder)) == folder
    assert not vllm_mtpc.has_heads(folder / "config.json")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not vllm_mtpc.has_heads(tmp_path)
    folder.rename(tmp_path / "mtpc")
    assert vllm_mtpc.has_heads(tmp_path)
    assert find_head(tmp_path) == tmp_path / "mtpc"


@pytest.mark.parametrize("path", ["", "nowhere", "~no_such_user_/head", "a\0b", "x" * 5000, "org/name", "x/" * 3000])
def test_missing_path_has_no_heads(path):
    assert not vllm_mtpc.has_heads(path)
    if path not in ("", "org/name"):
        assert "no head at" in refusal(resolve_head, path)


def test_has_heads_imports_neither_torch_nor_vllm(folder, tmp_path):
    (tmp_path / "target").mkdir()
    folder.rename(tmp_path / "target" / "mtpc")
    target = tmp_path / "target"
    code = (
        "import sys, vllm_mtpc; found = [vllm_mtpc.has_heads(p) for p in sys.argv[1:]]; "
        "print(found, sorted({'torch', 'vllm', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(target), str(target / "mtpc"), "nowhere"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert result.stdout.strip() == "[True, True, False] []"


def test_hub_name_is_downloaded_without_pickled_files(monkeypatch, folder):
    download = Mock(return_value=str(folder))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_head("someone/some-head", revision="v2") == folder
    assert download.call_args.args == ("someone/some-head",) and download.call_args.kwargs["revision"] == "v2"
    patterns = download.call_args.kwargs["allow_patterns"]
    assert not any(pattern.endswith((".pt", ".bin", "*")) for pattern in patterns)


@pytest.mark.parametrize("message", ["", "401\nlog in", "no such repository"])
def test_failed_download_is_one_line(monkeypatch, message):
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=RuntimeError(message)))
    assert "no head at 'someone/some-head': not a local folder" in refusal(resolve_head, "someone/some-head")


def test_target_path_is_relative_to_the_head(folder, monkeypatch):
    target = folder.parent / "target"
    target.mkdir()
    monkeypatch.chdir("/")
    assert resolve_verifier(folder, "../target") == str(target.resolve())
    assert resolve_verifier(folder, str(target)) == str(target.resolve())
    assert resolve_verifier(folder, "org/model") == "org/model"


@pytest.mark.parametrize("name", ["../qwen", "/nowhere/qwen", "./qwen", "a/b/c"])
def test_missing_target_folder_is_refused(folder, name):
    text = refusal(resolve_verifier, folder, name)
    assert f"config.json names the target {name!r}" in text
    assert f"no folder {(folder / name).resolve()} exists" in text
    assert "type vllm serve TARGET --speculative-config" in text and "--target TARGET" in text


def test_folder_in_a_head_is_not_taken_for_a_hub_name(folder):
    (folder / "org" / "model").mkdir(parents=True)
    assert "'org/model', a name on the hub, and a folder of that name is in the head" in refusal(
        resolve_verifier, folder, "org/model"
    )
    assert resolve_verifier(folder, "./org/model") == str((folder / "org" / "model").resolve())


@pytest.mark.parametrize("name", ["../target", "../../../models--a--b/snapshots/1", "/tmp"])
def test_downloaded_head_must_not_name_a_folder_outside_of_its_repository(folder, tmp_path, name):
    place = tmp_path / "models--someone--head" / "snapshots" / "0123"
    place.mkdir(parents=True)
    head = folder.rename(place / "mtpc")
    assert resolve_verifier(head, "..") == str(place.resolve())  # a bundled head
    head = head.rename(place.with_name("4567"))
    (place.parent / "target").mkdir()  # there or not
    (tmp_path / "models--a--b" / "snapshots" / "1").mkdir(parents=True)
    text = refusal(resolve_verifier, head, name)
    assert repr(name) in text and "outside of its repository" in text and "vllm serve TARGET" in text


@pytest.mark.parametrize("place, name", [("target", "../target"), ("head/target", "./target"), (".", "..")])
def test_target_folder_is_named_relative_to_the_head(folder, place, name):
    """A folder in the head's folder is named with a leading dot: without it, it would be a hub name."""
    (folder.parent / place).mkdir(exist_ok=True)
    assert verifier_name(str(folder.parent / place), folder) == name
    assert resolve_verifier(folder, name) == str((folder.parent / place).resolve())
