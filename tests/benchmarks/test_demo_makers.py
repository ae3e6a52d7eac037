"""The makers of the packaged demo: text that repeats, byte and subword targets that learn and can be read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.demo import byte_target, corpus, subword_target

VOCAB = 300


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("TOKENS_PER_STEP", 128), ("SHORT", 32), ("LONG", 64)):
        monkeypatch.setattr(byte_target, name, size)


@pytest.fixture
def text(tmp_path: Path) -> corpus.Corpus:
    lines = (f"def function_{index}(argument):\n    return argument + {index}  # größer\n" for index in range(200))
    (tmp_path / "text.txt").write_text("".join(lines))
    return corpus.load_file(tmp_path / "text.txt")


def test_corpus_is_the_same_on_every_call_and_keeps_held_out_files_apart(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"m{index:02d}.py").write_text(f"value_{index} = {index}\n" * 8)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skipped.py").write_text("skipped = True\n" * 8)
    first, second = corpus.load(tmp_path), corpus.load(tmp_path)
    assert first.sha256 == second.sha256 and first.files == 40
    held_out = bytes(byte for byte in first.valid.tokens.tolist() if byte != corpus.EOS)
    assert held_out == (tmp_path / "m19.py").read_bytes() + (tmp_path / "m39.py").read_bytes()
    crops = [corpus.crops(first.train, 64, 33, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*crops)


def test_byte_target_learns_and_repeats(text: corpus.Corpus) -> None:
    config = byte_target.target_config(layers=1, intermediate_size=64)
    before, first, second = (byte_target.train(text, *steps, config) for steps in ((1, 0), (30, 5), (30, 5)))
    assert byte_target.bits_per_byte(first, text.valid) < byte_target.bits_per_byte(before, text.valid) - 1
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("family", subword_target.FAMILIES)
def test_subword_target_of_every_family_is_trained_and_read(text: corpus.Corpus, family: str, tmp_path: Path) -> None:
    tokenizer, subwords = subword_target.as_subwords(text, VOCAB)
    assert tokenizer.decode(subwords.train.tokens[1:]).encode() == corpus.documents(text.train)[0]
    model = byte_target.train(subwords, 1, 0, subword_target.target_config(family, VOCAB, hidden_size=64))
    byte_target.save(model, tmp_path, tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == subword_target.FAMILIES[family] and config["vocab_size"] == VOCAB
    assert byte_target.load(tmp_path)(input_ids=subwords.train.tokens[None, :8].long()).logits.isfinite().all()
