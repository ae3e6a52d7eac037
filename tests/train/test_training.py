"""A few steps of each trainer on tiny text: the loss falls, runs repeat, files can be read back."""

import json

import pytest
import torch
from transformers import LlamaConfig

from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.config import HeadConfig
from vllm_mtpc.train import corpus, heads, pipeline, samples, target


@pytest.fixture(name="small", autouse=True)
def fixture_small(monkeypatch):
    """Trainers at a size that a test can afford."""
    config = LlamaConfig(
        vocab_size=corpus.VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=corpus.EOS,
        eos_token_id=corpus.EOS,
    )
    monkeypatch.setattr(target, "target_config", lambda: config)
    monkeypatch.setattr(target, "TOKENS_PER_STEP", 128)
    monkeypatch.setattr(target, "SHORT", 32)
    monkeypatch.setattr(target, "LONG", 64)
    monkeypatch.setattr(heads, "WINDOWS_PER_STEP", 32)


@pytest.fixture(name="text")
def fixture_text(tmp_path):
    for index in range(20):
        (tmp_path / f"m{index:02d}.py").write_text("for name in names:\n    print(name)\n" * 10)
    return corpus.load(tmp_path)


def test_target_learns_and_repeats(text):
    before = target.bits_per_byte(target.train(text, steps=1, long_steps=0), text.valid)
    first, second = target.train(text, steps=30, long_steps=5), target.train(text, steps=30, long_steps=5)
    assert target.bits_per_byte(first, text.valid) < before - 1
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_schedule_rises_stays_and_falls():
    factors = [target.schedule(step, 1700) for step in range(1700)]
    assert factors[0] == pytest.approx(1 / target.WARM_UP)
    assert factors[1000] == 1
    assert 0 < factors[-1] <= 1 / target.COOL_DOWN
    assert all(target.schedule(step, 3) > 0 for step in range(3))


@pytest.mark.parametrize("circuit", ["ff", "cp", "hmm", "btree"])
def test_head_learns(text, circuit):
    model = target.train(text, steps=20, long_steps=0).requires_grad_(False)
    lm_head = model.lm_head.weight
    data = samples.generate(model, text.train, sequences=8, new_tokens=32, temperature=1.0, seed=0)
    config = HeadConfig.create(
        circuit=circuit, window=4, num_components=1 if circuit == "ff" else 2, target=model.config, verifier="../target"
    )
    rows, positions = torch.arange(8).repeat(20), torch.arange(20).repeat_interleave(8)
    tokens, states = heads.window_batch(data, rows, positions, 4)
    losses = []
    for steps in (1, 40):
        head = heads.train(config, lm_head, data, steps, windows=32)
        losses.append(heads.head_loss(head, lm_head, states, tokens).item())
    assert losses[1] < losses[0]


def test_generated_states_are_those_of_one_forward(text):
    model = target.train(text, steps=5, long_steps=0)
    data = samples.generate(model, text.train, sequences=3, new_tokens=10, temperature=0.0, seed=0)
    with torch.no_grad():
        whole = model.model(input_ids=data.tokens[:, :-1]).last_hidden_state
    torch.testing.assert_close(data.hidden, whole, atol=1e-5, rtol=1e-4)
    greedy = (whole[:, data.prompt - 1 :] @ model.lm_head.weight.T).argmax(-1)
    assert torch.equal(greedy, data.tokens[:, data.prompt :])


def test_pipeline_writes_everything(text, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "load", lambda: text)
    out = tmp_path / "assets"
    with pytest.raises(ValueError, match=r"run scripts/train_demo\.sh --only target first"):
        pipeline.run("heads", True, out, 0)
    pipeline.run(None, True, out, 0)
    for name in ("target", "ff", "cp", "hmm", "btree"):
        record = json.loads((out / name / "provenance.json").read_text())
        assert record["command"] == "scripts/train_demo.sh --quick"
        assert record["data"]["sha256"] == text.sha256
        assert "nan" not in (out / name / "README.md").read_text()
        assert str(tmp_path) not in "".join(path.read_text() for path in (out / name).glob("*.json"))
    config, _ = load_head(out / "btree")
    assert config.speculators_config.verifier.name_or_path == "../target"
    assert record["figures"]["t1"]["tokens_per_step"] == pytest.approx(
        1 + sum(record["figures"]["t1"]["per_position"]), abs=1e-6
    )
