"""`vllm serve HEAD`: what a head, here or on the hub, may name as its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.proposers.patches.vllm_patches import maybe_override_with_speculators


def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, **given: Any) -> tuple[Any, ...]:
    """What vLLM goes on with for a head on the hub that names `target`."""
    import huggingface_hub

    snapshot = tmp_path / "models--someone--head" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "target").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # ../target is there
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: str(snapshot))

    def vllms(model: str, **options: Any) -> tuple[Any, ...]:
        return target, target, {"method": "mtpc", "model": model, "num_speculative_tokens": 3}

    return maybe_override_with_speculators.replace(vllms)("someone/head", revision=None, **given)


@pytest.mark.parametrize("target", ["../target", "/tmp", "./target", "org/model"])
def test_target_is_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    if target == "org/model":
        assert serve(tmp_path, monkeypatch, target)[0] == target
        return
    with pytest.raises(CheckpointError, match=f"names the target {target!r}") as caught:
        serve(tmp_path, monkeypatch, target)
    assert "vllm serve TARGET --speculative-config" in str(caught.value) and len(str(caught.value)) < 500


def test_a_head_that_was_moved_says_what_to_type(tmp_path: Path) -> None:
    """vLLM's own words would be "Invalid repository ID"."""
    target = {"vocab_size": 5, "hidden_size": 8}
    config = HeadConfig.create(circuit="cp", window=4, num_components=2, target=target, verifier="../qwen")
    (tmp_path / "config.json").write_text(config.to_json())
    override = maybe_override_with_speculators.replace(
        lambda model: ("../qwen", "../qwen", {"method": "mtpc", "model": model})
    )
    with pytest.raises(CheckpointError) as caught:
        override(str(tmp_path))
    text = str(caught.value)
    assert "names the target '../qwen'" in text and f"no folder {tmp_path.parent / 'qwen'}" in text
    assert f'vllm serve TARGET --speculative-config \'{{"method": "mtpc", "model": "{tmp_path}"}}\'' in text
