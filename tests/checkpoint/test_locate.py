"""Finding heads: has_heads, folders, hub names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import vllm_mtpc
from vllm_mtpc.checkpoint import find_head, resolve_head, resolve_verifier
from vllm_mtpc.checkpoint.locate import verifier_name
from vllm_mtpc.errors import CheckpointError


@pytest.fixture
def target(tmp_path, folder) -> Path:
    """A target's folder that bundles the head in `mtpc/`."""
    place = tmp_path / "target"
    place.mkdir()
    (place / "config.json").write_text('{"model_type": "llama"}')
    folder.rename(place / "mtpc")
    return place


def refusal(path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_head(path)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_head_folder_has_heads(folder):
    assert vllm_mtpc.has_heads(folder)
    assert vllm_mtpc.has_heads(str(folder))
    assert find_head(folder) == folder


def test_a_target_that_ships_heads_has_heads(target):
    assert vllm_mtpc.has_heads(target)
    assert find_head(target) == target / "mtpc"


def test_a_folder_without_a_head_has_none(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not vllm_mtpc.has_heads(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"1" * 5000, b"[" * 100_000])
def test_a_garbage_config_has_no_heads(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    assert not vllm_mtpc.has_heads(tmp_path)


@pytest.mark.parametrize("path", ["", "nowhere", "~no_such_user_/head", "a\0b", "x" * 5000, "org/name", "x/" * 3000])
def test_a_path_that_is_not_there_has_no_heads(path):
    assert not vllm_mtpc.has_heads(path)


def test_a_file_has_no_heads(folder):
    assert not vllm_mtpc.has_heads(folder / "config.json")


def test_asking_for_heads_loads_neither_torch_nor_vllm(target):
    code = (
        "import sys, vllm_mtpc; found = [vllm_mtpc.has_heads(p) for p in sys.argv[1:]]; "
        "print(found, sorted({'torch', 'vllm', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(target), str(target / "mtpc"), "nowhere"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert result.stdout.strip() == "[True, True, False] []"


def test_a_folder_resolves_to_itself(folder):
    assert resolve_head(str(folder)) == folder


@pytest.mark.parametrize("path", ["/nowhere/head", "nowhere", "./a/b", "~no_such_user_/head", "a\0b", "x" * 5000])
def test_a_path_that_is_not_there_is_refused(path):
    assert "no head at" in refusal(path)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_a_pickled_file_is_refused_with_the_reason(tmp_path, suffix):
    file = tmp_path / f"model{suffix}"
    file.write_bytes(b"pickle")
    text = refusal(str(file))
    assert str(file) in text
    assert "pickled weights are never loaded" in text
    assert "model.safetensors" in text


def test_a_single_safetensors_file_is_refused_with_what_a_head_is(folder):
    text = refusal(str(folder / "model.safetensors"))
    assert "a head is a folder" in text
    assert "pickled" not in text


def test_a_hub_name_is_downloaded_without_pickled_files(monkeypatch, folder):
    import huggingface_hub

    asked = {}

    def download(repo, **options):
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_head("someone/some-head", revision="v2") == folder
    assert asked["repo"] == "someone/some-head"
    assert asked["revision"] == "v2"
    assert not any(pattern.endswith((".pt", ".bin", "*")) for pattern in asked["allow_patterns"])


@pytest.mark.parametrize("message", ["", "401\nlog in", "no such repository"])
def test_a_hub_name_that_cannot_be_had_is_refused_in_one_line(monkeypatch, message):
    import huggingface_hub

    def download(repo, **options):
        raise RuntimeError(message)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert "'someone/some-head'" in refusal("someone/some-head")


def test_a_hub_name_without_the_hub_client_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "huggingface_hub" in refusal("someone/some-head")


def refused_verifier(folder: Path, name: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_verifier(folder, name)
    assert len(str(caught.value)) < 500
    return str(caught.value)


def test_a_relative_verifier_starts_at_the_heads_folder(folder, monkeypatch):
    target = folder.parent / "target"
    target.mkdir()
    monkeypatch.chdir("/")
    assert resolve_verifier(folder, "../target") == str(target.resolve())
    assert resolve_verifier(folder, str(target)) == str(target.resolve())
    assert resolve_verifier(folder, "org/model") == "org/model"


@pytest.mark.parametrize("name", ["../qwen", "/nowhere/qwen", "./qwen", "a/b/c"])
def test_a_head_that_was_moved_away_from_its_target_says_so(folder, name):
    text = refused_verifier(folder, name)
    assert f"config.json names the target {name!r}" in text
    assert f"no folder {(folder / name).resolve()}" in text
    assert "type vllm serve TARGET --speculative-config" in text and "--target TARGET" in text


def test_a_folder_in_a_head_does_not_pass_for_a_model_on_the_hub(folder):
    (folder / "org" / "model").mkdir(parents=True)
    assert "'org/model', a name on the hub, and a folder of that name is in the head" in refused_verifier(
        folder, "org/model"
    )
    assert resolve_verifier(folder, "./org/model") == str((folder / "org" / "model").resolve())


@pytest.mark.parametrize("name", ["../target", "../../../models--a--b/snapshots/1", "/tmp"])
def test_a_head_from_the_hub_names_no_folder_outside_of_its_repository(folder, tmp_path, name):
    place = tmp_path / "models--someone--head" / "snapshots" / "0123"
    place.parent.mkdir(parents=True)
    folder.rename(place)
    (place.parent / "target").mkdir()  # there or not
    (tmp_path / "models--a--b" / "snapshots" / "1").mkdir(parents=True)
    text = refused_verifier(place, name)
    assert repr(name) in text and "outside of its repository" in text and "vllm serve TARGET" in text


def test_a_target_on_the_hub_ships_a_head_that_names_the_folder_above(folder, tmp_path):
    place = tmp_path / "models--someone--target" / "snapshots" / "0123" / "mtpc"
    place.parent.mkdir(parents=True)
    folder.rename(place)
    assert resolve_verifier(place, "..") == str(place.parent.resolve())


@pytest.mark.parametrize("place, name", [("target", "../target"), ("head/target", "./target"), (".", "..")])
def test_a_folder_is_named_so_that_it_is_found(folder, place, name):
    """A folder inside of the head's has a dot in front: without one it would be a name on the hub."""
    (folder.parent / place).mkdir(exist_ok=True)
    assert verifier_name(str(folder.parent / place), folder) == name
    assert resolve_verifier(folder, name) == str((folder.parent / place).resolve())
