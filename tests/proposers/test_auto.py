"""Bundled heads: which one is served, what overrides it, what a bad one costs; targets named by heads on the hub."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.configs import engine_config
from vllm_mtpc.checkpoint.locate import bundled_heads, find_head
from vllm_mtpc.errors import CheckpointError, MtpcError
from vllm_mtpc.proposers.options import switches
from vllm_mtpc.proposers.options.switches import AUTO
from vllm_mtpc.proposers.patches.vllm_patches import find_bundled_head, find_folder, maybe_override_with_speculators

Lines = list[str]


@pytest.fixture
def target(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the target, which bundles nothing yet."""
    monkeypatch.delenv(AUTO, raising=False)
    return Path(shutil.copytree(made / "target", tmp_path / "target"))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """Lines that the package logs."""
    lines: Lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(switches.logger, "handlers", [handler])
    monkeypatch.setattr(switches.logger, "level", logging.INFO)
    switches.logger.manager._clear_cache()
    return lines


def bundle(made: Path, target: Path, head: str = "head", name: str = "") -> Path:
    return Path(shutil.copytree(made / head, target / "mtpc" / name, dirs_exist_ok=True))


def spec_of(target: Path, given: dict[str, Any] | None = None, **arguments: Any) -> Any:
    return engine_config(target, given, **arguments).speculative_config


def test_a_target_without_heads_is_left_alone(target: Path, said: Lines) -> None:
    assert spec_of(target) is None
    (target / "mtpc").mkdir()
    (target / "mtpc" / "notes.txt").write_text("no head")
    assert spec_of(target) is None and said == []


def test_a_bundled_head_is_engaged_and_said_once(made: Path, target: Path, said: Lines) -> None:
    """Engine arguments stay as given."""
    from vllm.engine.arg_utils import EngineArgs

    head = bundle(made, target)
    arguments = EngineArgs(str(target), dtype="float32", max_model_len=64, skip_tokenizer_init=True)
    arguments.kv_cache_memory_bytes = 1 << 26
    for number in (1, 2):
        spec = arguments.create_engine_config().speculative_config
        assert (spec.method, spec.model_folder, spec.num_speculative_tokens) == ("mtpc", str(head), 4)
        assert arguments.speculative_config is None and len(said) == number
    assert "MTPC_AUTO=0" in said[0] and str(target) in said[0]


def test_config_of_the_user_has_precedence(
    made: Path, target: Path, said: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle(made, target)
    for value in ("0", "off", "False"):
        monkeypatch.setenv(AUTO, value)
        assert spec_of(target, fail_on_environ_validation=True) is None and said == []
    monkeypatch.delenv(AUTO)
    assert spec_of(target, {"method": "ngram", "num_speculative_tokens": 2}).method == "ngram"
    own = spec_of(target, {"method": "mtpc", "model": str(made / "head"), "num_speculative_tokens": 1})
    assert (own.model_folder, own.num_speculative_tokens) == (str(made / "head"), 1)


def test_which_of_several(made: Path, target: Path) -> None:
    """mtpc/ itself, else mtpc/default/, else the first by name; the same without --spec-model."""
    for name in ("b", "a", "default"):
        bundle(made, target, name=name)
    assert spec_of(target).model_folder == str(target / "mtpc" / "default")
    shutil.rmtree(target / "mtpc" / "default")
    assert spec_of(target).model_folder == str(target / "mtpc" / "a")
    assert find_head(target) == target / "mtpc" / "a"
    bundle(made, target)
    assert spec_of(target, {"method": "mtpc"}).model == str(target / "mtpc")
    assert bundled_heads(target) == [target / "mtpc", target / "mtpc" / "a", target / "mtpc" / "b"]
    assert spec_of(target).model_folder == str(target / "mtpc")


def refused(target: Path, said: Lines) -> str:
    """The one warning of a target that is served without its head."""
    assert spec_of(target) is None
    (line,) = said
    assert line.startswith("Serving without drafts") and "\n" not in line
    return line


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"hidden_size": 96}, "hidden_size"),
        ({"vocab_size": 64}, "vocab_size"),
        ({"surprise": 1}, "surprise"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type"),
        (None, "cannot be read as JSON"),
        ({}, "model.safetensors"),
    ],
)
def test_unfit_or_damaged_head_is_not_served(
    made: Path, target: Path, said: Lines, change: dict[str, Any] | None, reason: str
) -> None:
    file = bundle(made, target) / "config.json"
    file.write_text("{" if change is None else json.dumps({**json.loads(file.read_text()), **change}))
    if change == {}:
        (file.parent / "model.safetensors").unlink()
    assert reason in refused(target, said)


def test_a_head_for_the_other_runner(made: Path, target: Path, said: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known once the engine's configuration is made: it is then made again, without the head."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    bundle(made, target, "o-ptp")
    assert "Model Runner V1" in refused(target, said)
    with pytest.raises(MtpcError, match="Model Runner V1"):  # explicit flags are refused as before
        spec_of(target, {"method": "ptp"})


def test_an_error_of_the_target_is_its_own(made: Path, target: Path, said: Lines) -> None:
    """What fails with and without the head says what vLLM says, and nothing of a head."""
    bundle(made, target)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        spec_of(target, max_num_batched_tokens=8, max_num_seqs=16)
    assert not any("without drafts" in line for line in said)


def test_a_repository_in_the_hubs_cache(made: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded: what counts is the snapshot that is there."""
    head, cached = bundle(made, target), {"a/b": target}
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache",
        lambda repo, name, revision: str(cached[repo] / name) if repo in cached else None,
    )
    for name, runner, found in (("a/b", "generate", head), ("a/c", "generate", None), ("a/b", "pooling", None)):
        model = SimpleNamespace(model=name, revision=None, runner_type=runner)
        assert find_bundled_head(SimpleNamespace(speculative_config=None), model) == found
    monkeypatch.undo()
    assert find_folder("s3://bucket/model.gguf", None) is None  # no repository's name


def override(target: str) -> Any:
    """vLLM's override for `vllm serve HEAD`, with a head that names this target."""

    def vllms(model: str, **options: Any) -> tuple[Any, ...]:
        return target, target, {"method": "mtpc", "model": model, "num_speculative_tokens": 3}

    return maybe_override_with_speculators.replace(vllms)


@pytest.mark.parametrize("target", ["../target", "/tmp", "./target", "org/model"])
def test_target_of_a_head_on_the_hub_is_a_name_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    snapshot = tmp_path / "models--someone--head" / "snapshots" / "0123"
    for folder in (snapshot, tmp_path / "target", tmp_path / "here"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")  # ../target is there
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: str(snapshot))
    if target == "org/model":
        assert override(target)("someone/head", revision=None)[0] == target
        return
    with pytest.raises(CheckpointError, match=f"names the target {target!r}") as caught:
        override(target)("someone/head", revision=None)
    assert "vllm serve TARGET --speculative-config" in str(caught.value) and len(str(caught.value)) < 500
