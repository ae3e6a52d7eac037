"""The BPE of the subword example, the text in its ids, and the script that makes and serves the example."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.demo import byte_target, corpus, subword_target

VOCAB = 300


@pytest.fixture(name="text")
def fixture_text(tmp_path: Path) -> corpus.Corpus:
    file = tmp_path / "text.txt"
    lines = (f"def function_{index}(argument):\n    return argument + {index}  # größer\n" for index in range(200))
    file.write_text("".join(lines))
    return corpus.load_file(file)


def test_text_in_subwords_is_the_text(text: corpus.Corpus) -> None:
    tokenizer, subwords = subword_target.as_subwords(text, VOCAB)
    assert len(tokenizer) == VOCAB and tokenizer.eos_token_id == subword_target.EOS
    for part, ids in ((text.train, subwords.train), (text.valid, subwords.valid)):
        (document,) = corpus.documents(part)
        assert ids.starts.tolist() == [0] and ids.tokens[0] == subword_target.EOS
        assert tokenizer.decode(ids.tokens[1:]).encode() == document
        assert len(ids.tokens) < 0.7 * len(part.tokens)


def test_lines_start_behind_line_breaks(text: corpus.Corpus) -> None:
    tokenizer, subwords = subword_target.as_subwords(text, VOCAB)
    part = subwords.train
    before = tokenizer.batch_decode(part.tokens[part.lines - 1][:, None])
    assert before and all(one.endswith("\n") for one in before)
    assert torch.equal(part.tokens, subword_target.as_subwords(text, VOCAB)[1].train.tokens)  # the same every time


def test_too_short_a_text_is_refused(text: corpus.Corpus) -> None:
    with pytest.raises(ValueError, match="4096 are needed: name a longer text"):
        subword_target.as_subwords(text)


@pytest.mark.parametrize("family", subword_target.FAMILIES)
def test_families_are_built_and_trained(text: corpus.Corpus, family: str, tmp_path: Path) -> None:
    """One step of each: what is saved is of the family, and gives finite logits when it is read again."""
    tokenizer, subwords = subword_target.as_subwords(text, VOCAB)
    model = byte_target.train(subwords, 1, 0, subword_target.target_config(family, VOCAB, hidden_size=64))
    byte_target.save(model, tmp_path, tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == subword_target.FAMILIES[family] and config["vocab_size"] == VOCAB
    assert byte_target.load(tmp_path)(input_ids=subwords.train.tokens[None, :8].long()).logits.isfinite().all()
    chat = [{"role": "user", "content": "argument"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).endswith("# assistant\n")


@pytest.mark.slow
def test_the_whole_example(root: Path) -> None:
    """From text to a table of served heads; too few steps for figures, so what is checked is that they are there."""
    out = root / "build" / "subword-quick"
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run([root / "scripts" / "subword_demo.sh", "--quick"], check=True, timeout=1500)
    result = json.loads((out / "serve.json").read_text())
    names = {row["decoding"].replace(",", " ").split()[0] for row in result["rows"]}
    assert names == {"plain", "ff", "btree"} and not result["not_run"]
    assert all(row["identical"][0] == row["identical"][1] for row in result["rows"] if row["identical"])
    head = json.loads((out / "btree" / "config.json").read_text())
    assert (head["head"], head["vocab_size"]) == ("shared", subword_target.VOCAB_SIZE)
