"""The packaged head as docs/your-model.md publishes it: the files of `hf upload`, its card, and its name on the hub."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects

from vllm_mtpc import demo
from vllm_mtpc.checkpoint import load_head, resolve_head, resolve_verifier

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "your-model.md"


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The head in the cache of the hub, as a download leaves it, after the upload of a training's out folder."""
    head, cache = tmp_path / "head", tmp_path / "models--someone--head"
    shutil.copytree(demo.path(demo.CHAT), head)
    for left in ("state/step-7/rank-0.pt", "data/responses.jsonl"):  # of its training
        (head / left).parent.mkdir(parents=True)
        (head / left).write_text("")
    (command,) = re.findall(r"^hf upload OWNER/NAME HEAD .*$", GUIDE.read_text(), re.MULTILINE)
    words = shlex.split(command)
    excluded = [words[index + 1] for index, word in enumerate(words) if word == "--exclude"]
    files = [str(file.relative_to(head)) for file in head.rglob("*") if file.is_file()]
    for file in filter_repo_objects(files, ignore_patterns=excluded):
        (cache / "snapshots" / "0123" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(head / file, cache / "snapshots" / "0123" / file)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return cache / "snapshots" / "0123"


def test_the_upload_has_the_head_alone(published: Path) -> None:
    files = {file.name for file in published.rglob("*")}
    assert files == {"README.md", "config.json", "model.safetensors", "provenance.json"}


def test_the_published_head_is_found_by_its_name_and_names_its_target(published: Path) -> None:
    folder = resolve_head("someone/head")
    config, _ = load_head(folder)
    assert folder.samefile(published)
    assert resolve_verifier(folder, config.speculators_config.verifier.name_or_path) == demo.CHAT_MODEL


def test_the_card_says_what_the_hub_shows(published: Path) -> None:
    card = ModelCard.load(published / "README.md")
    assert (card.data.base_model, card.data.license) == (demo.CHAT_MODEL, "apache-2.0")
    assert {"mtpc", "speculative-decoding"} <= set(card.data.tags or ())
    assert [found.metric_name for found in card.data.eval_results or ()] == ["Tokens/step at T=1", "Tokens/step at T=0"]
    assert "| Tokens/step |" in card.text and f"Weights of the target: {demo.CHAT_MODEL}, quantized" in card.text
    assert f"vllm serve {demo.CHAT_MODEL} --speculative-config" in card.text
