"""The trainer of byte-level targets: it learns, repeats, and what it writes can be read back."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks.demo import byte_target, corpus, train_target


@pytest.fixture(name="small", autouse=True)
def fixture_small(monkeypatch):
    """A size that a test can afford."""
    monkeypatch.setattr(byte_target, "TOKENS_PER_STEP", 128)
    monkeypatch.setattr(byte_target, "SHORT", 32)
    monkeypatch.setattr(byte_target, "LONG", 64)


@pytest.fixture(name="text")
def fixture_text(tmp_path):
    for index in range(20):
        (tmp_path / f"m{index:02d}.py").write_text("for name in names:\n    print(name)\n" * 10)
    return corpus.load(tmp_path)


def config():
    return byte_target.target_config(layers=1, intermediate_size=64)


def test_target_learns_and_repeats(text):
    def train(steps: int, long_steps: int):
        return byte_target.train(text, steps, long_steps, config())

    before = byte_target.bits_per_byte(train(1, 0), text.valid)
    first, second = train(30, 5), train(30, 5)
    assert byte_target.bits_per_byte(first, text.valid) < before - 1
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_schedule_rises_stays_and_falls():
    factors = [byte_target.schedule(step, 1700) for step in range(1700)]
    assert factors[0] == pytest.approx(1 / byte_target.WARM_UP)
    assert factors[1000] == 1
    assert 0 < factors[-1] <= 1 / byte_target.COOL_DOWN
    assert all(byte_target.schedule(step, 3) > 0 for step in range(3))


def test_minutes_decide_how_many_steps_there_are(monkeypatch):
    now, found = [0.0], []
    monkeypatch.setattr(byte_target.time, "monotonic", lambda: now[0])
    for one in byte_target.pace(1700, minutes=1.0):
        found.append(one)
        now[0] += 2.0
    assert len(found) == 30 and found[0] == (0, 1700) and {most for _, most in found[10:]} == {30}
    assert list(byte_target.pace(3, None)) == [(0, 3), (1, 3), (2, 3)]


def test_the_text_of_packages_comes_behind_the_librarys(text, tmp_path):
    more = corpus.load(tmp_path, packages=["tqdm"])
    assert more.files > text.files and more.sha256 != text.sha256
    assert corpus.documents(more.train)[:19] == corpus.documents(text.train)


def test_the_command_writes_a_target(tmp_path, monkeypatch):
    file = tmp_path / "words.txt"
    file.write_bytes(b"to be or not to be, that is the question. " * 100)
    words = ["--out", str(tmp_path / "target"), "--text", str(file), "--steps", "3", "--long-steps", "1"]
    monkeypatch.setattr(sys, "argv", ["train_target", *words, "--layers", "1", "--intermediate-size", "32"])
    train_target.main()
    record = json.loads((tmp_path / "target" / "provenance.json").read_text())
    assert record["data"]["description"] == "words.txt as bytes; its last 1/20 held out"
    model = byte_target.load(tmp_path / "target")
    assert model.config.num_hidden_layers == 1 and model.config.dtype == torch.float32
    held_out = corpus.load_file(file).valid
    measured = byte_target.bits_per_byte(model, held_out, 32, train_target.LOSS_BYTES)
    assert record["figures"]["bits_per_byte"] == pytest.approx(measured)
    assert f"{measured:.4f}" in (tmp_path / "target" / "README.md").read_text()


def test_corpus_as_training_data(text, tmp_path):
    corpus.write_jsonl(text, tmp_path / "data")
    lines = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    assert [line["text"].encode() for line in lines] == corpus.documents(text.train)
    assert len((tmp_path / "data" / "valid.jsonl").read_text().splitlines()) == 1
