"""The demo corpus is the same on every call and keeps its held-out part apart."""

import pytest
import torch

from benchmarks.demo import corpus


@pytest.fixture(name="root")
def fixture_root(tmp_path):
    for index in range(40):
        (tmp_path / f"m{index:02d}.py").write_text(f"value_{index} = {index}\n" * 8)
    for folder in ("tests", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "skipped.py").write_text("skipped = True\n" * 8)
    (tmp_path / "_sysconfigdata_x.py").write_text("machine = 1\n" * 8)
    return tmp_path


def test_same_text_every_time(root):
    first, second = corpus.load(root), corpus.load(root)
    assert first.sha256 == second.sha256
    assert torch.equal(first.train.tokens, second.train.tokens)
    assert first.files == 40  # neither tests, nor other people's packages, nor the build's own configuration


def test_every_twentieth_file_is_held_out(root):
    text = corpus.load(root)
    held_out = bytes(byte for byte in text.valid.tokens.tolist() if byte != corpus.EOS)
    assert held_out == (root / "m19.py").read_bytes() + (root / "m39.py").read_bytes()
    assert text.valid.tokens[text.valid.starts].tolist() == [corpus.EOS] * 2
    assert len(text.train.starts) == 38


def test_lines_start_after_a_newline(root):
    part = corpus.load(root).train
    assert (part.tokens[part.lines - 1] == ord("\n")).all()
    assert (part.tokens[part.lines] != corpus.EOS).all()


def test_crops_follow_the_seed_and_the_text(root):
    part = corpus.load(root).train
    first = corpus.crops(part, 64, 33, torch.Generator().manual_seed(3))
    assert torch.equal(first, corpus.crops(part, 64, 33, torch.Generator().manual_seed(3)))
    assert first.shape == (64, 33)
    text = bytes(byte % 256 for byte in part.tokens.tolist())
    assert all(bytes(byte % 256 for byte in row) in text for row in first.tolist())


def test_too_small_a_library_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 20 are needed"):
        corpus.load(tmp_path)
