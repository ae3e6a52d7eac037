"""`vllm-mtpc push` against a fake hub: it sends the head's files only, and every failure is one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from tests.support.hub import Hub, hub_server
from vllm_mtpc import demo
from vllm_mtpc.cli import main
from vllm_mtpc.publish import complete_card, published_files

TARGET = "someone/target"
HEAD_FILES = {"README.md", "config.json", "model.safetensors", "provenance.json", "loss.png", "acceptance.png"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with hub_server(tmp_path) as server:
        yield server


def of_hub_target(name: str, folder: Path) -> Path:
    """A copy of a packaged head, of a target on the hub."""
    shutil.copytree(demo.path(name), folder)
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = TARGET
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A head for a target on the hub, in a folder where a trainer has left more than the head."""
    folder = of_hub_target("btree", tmp_path / "head")
    for name in ("state/rng.pt", "data/responses.jsonl", "optimizer.bin", "train.log", ".env", "other.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not to be sent")
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The only error line of a command that failed."""
    assert main(["push", *map(str, words)]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("vllm-mtpc: error:")]
    return line


def test_push_sends_head_files_as_one_commit(hub: Hub, head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (head / "README.md").read_text().replace("license: apache-2.0\n", "language: code\n")
    (head / "README.md").write_text(text)
    hub.cards[TARGET] = "---\nlicense: other\nlicense_name: theirs\n---\n# Target\n"
    assert main(["push", str(head), "me/head", "--private"]) == 0
    printed = capsys.readouterr().out
    assert hub.created["me/head"]["visibility"] == "private"
    (sent,) = hub.commits
    assert sent.keys() == HEAD_FILES
    for name in HEAD_FILES - {"README.md"}:
        assert sent[name] == (head / name).read_bytes(), name
    found = yaml.safe_load(sent["README.md"].decode().split("---\n")[1])
    assert (found["license"], found["license_name"]) == ("other", "theirs")  # the target's
    assert (found["base_model"], found["language"]) == (TARGET, "code")
    assert sent["README.md"].decode().partition("\n# ")[2] == text.partition("\n# ")[2]
    assert (head / "README.md").read_text() == text
    assert f"{len(sent['model.safetensors']):,}  model.safetensors" in printed and "license: other" in printed
    assert f"{hub.url}/me/head/commit/" in printed and "vllm serve me/head" in printed


@pytest.mark.parametrize(
    "place, status",
    [
        ("/api/repos/create", 401),
        ("/api/models/me/head/commit", 403),
        ("/lfs/", 403),
        ("/api/models/me/head/preupload", 404),
    ],
)
def test_push_prints_one_line_for_hub_errors(
    hub: Hub, head: Path, capsys: pytest.CaptureFixture[str], place: str, status: int
) -> None:
    hub.refuse[place] = status
    error = refused(capsys, head, "me/head")
    assert f"{status} " in error and "hf auth login" in error
    assert not hub.commits and any(place in one for one in hub.asked)


def test_push_prints_one_line_without_token_or_connection(
    hub: Hub, head: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("HF_TOKEN")
        assert "hf auth login" in refused(capsys, head, "me/head") and not hub.created
    monkeypatch.setattr(constants, "ENDPOINT", nothing := "http://127.0.0.1:9")  # discard: nothing listens
    assert f"me/head on {nothing}: not uploaded" in refused(capsys, head, "me/head")


def test_dry_run_sends_no_request(hub: Hub, head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(head), "me/head", "--dry-run", "--license", "mit"]) == 0
    printed = capsys.readouterr().out
    assert "model.safetensors" in printed and "license: mit" in printed and "nothing was sent" in printed
    assert not hub.asked


@pytest.mark.parametrize("name", ["me/head/more", "me/he ad", "me/" + "a" * 97, "../head"])
def test_push_refuses_invalid_repository_names(head: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    line = refused(capsys, head, name, "--license", "mit")
    assert f"{name} on " in line and "not uploaded" in line


def test_push_refuses_folders_without_a_valid_head(
    head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "config.json: cannot be read (No such file or directory)" in refused(capsys, tmp_path, "me/head")
    assert "config.json: not a head's config" in refused(capsys, demo.path("target"), "me/head")
    assert "its target is the local folder '../target'" in refused(capsys, demo.path("btree"), "me/head")
    data = (head / "model.safetensors").read_bytes()
    (head / "model.safetensors").write_bytes(data[:-2] + b"\xff\x7f")  # NaN
    assert "NaN" in refused(capsys, head, "me/head")
    (head / "README.md").write_text("---\ntags: [\n---\n# Mine\n")
    (head / "model.safetensors").write_bytes(data)
    assert "README.md: cannot be read" in refused(capsys, head, "me/head")
    (head / "model.safetensors").rename(head / "model.bin")
    assert "pickled weights are never loaded" in refused(capsys, head, "me/head")


@pytest.mark.parametrize("text", [None, "---\nmodel-index: nothing\ntags: mine\n---\n# Mine\n"])
def test_push_completes_a_missing_or_invalid_card(head: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (head / "README.md").unlink()
    if text:
        (head / "README.md").write_text(text)
    assert main(["push", str(head), "me/head", "--dry-run"]) == 0
    assert "no licence, so others may not use the head" in capsys.readouterr().out
    card = complete_card(head, None, is_online=False)
    assert (card.data.license, card.data.base_model, card.data.eval_results) == (None, TARGET, None)
    assert card.data.tags == [*["mine"] * bool(text), "mtpc", "speculative-decoding"]
    assert card.text.strip() == ("# Mine" if text else f"A draft head for `{TARGET}`.")


def test_push_sends_adapters_of_a_ptp_head(tmp_path: Path) -> None:
    folder = of_hub_target("o-ptp", tmp_path / "head")
    names = {file.name for file in published_files(folder)}
    weights = {name for name in names if name.endswith(".safetensors")}
    assert weights == {"u_embed.safetensors", "adapter_model.safetensors"} and "adapter_config.json" in names
    card = complete_card(folder, "mit", is_online=False)
    assert card.data.license == "mit" and "ptp" in card.data.tags
