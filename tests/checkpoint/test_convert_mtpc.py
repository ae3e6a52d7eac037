"""`vllm-mtpc convert` of MtPC heads in their authors' layout: the distribution stays theirs, what is not known is
refused."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from tests.support import authors_mtpc as authors
from tests.support.files import front_matter_of
from vllm_mtpc.checkpoint import check_tensors, load_head
from vllm_mtpc.checkpoint.inspect import inspect_head
from vllm_mtpc.cli import main

torch.set_num_threads(1)
D = 4
# kind, n, r and V: tables of V ** n entries stay small.
HEADS = [
    ("cp", 3, 1, 3),  # what they call cp of one component is ff here
    ("cp", 3, 3, 3),
    ("cp", 4, 3, 3),
    ("hmm", 2, 3, 3),
    ("hmm", 3, 3, 3),
    ("hmm", 4, 3, 3),
    ("hmm", 4, 1, 3),
    ("btree", 2, 3, 3),
    ("btree", 4, 3, 3),
    ("btree", 4, 1, 3),
    ("btree", 8, 3, 2),
]
BIASES = [
    "mt_head._sum_weights_heads.{}.head.bias",
    "mt_head._sum_weights_heads.{}.identity_logits",
    "mt_head._hmm_biases.{}",
    "mt_head.transition_{}",
]
TOLERANCE = 1e-5  # nats: float32 sums of at most 8 logarithms and 3 ** 7 latents; a misplaced fold moves log p by 0.1


def target(folder: Path, vocab_size: int = 3, **values: object) -> Path:
    config = {"vocab_size": vocab_size, "hidden_size": D, "num_hidden_layers": 3, "num_attention_heads": 2} | values
    LlamaConfig(intermediate_size=6, num_key_value_heads=1, head_dim=2, **config).save_pretrained(folder / "target")
    return folder / "target"


def checkpoint(folder: Path, kind: str = "hmm", n: int = 3, r: int = 3, change=None, bias=None, **settings) -> Path:
    """model@900.pt, its state dict changed by `change`."""
    state = authors.state_dict(kind, n, r, 3, D, bias=bias)
    return authors.save(folder / "run", state if change is None else change(state), kind, n, r, 3, D, **settings)


def convert(file: Path, target: Path, *flags: object) -> Path:
    out = target.parent / "head"
    assert main(["convert", str(file), "--target", str(target), "--out", str(out), *map(str, flags)]) == 0
    return out


def refusal(file: Path | str, target: Path, capsys, *flags: object) -> str:
    out = target.parent / "head"
    assert main(["convert", str(file), "--target", str(target), "--out", str(out), *map(str, flags)]) == 1
    text = capsys.readouterr().err
    assert text.startswith("vllm-mtpc: error: ") and text.count("\n") == 1
    assert not out.exists()
    return text


def table(out: Path, hidden: torch.Tensor) -> np.ndarray:
    """log p of every window by the head in `out`."""
    config, head = load_head(out)
    tokens = torch.tensor(list(product(range(config.vocab_size), repeat=config.window)))
    with torch.no_grad():
        params = head(hidden.expand(len(tokens), -1))
        return head.circuit.log_prob(params, tokens).double().numpy()


def hidden(seed: int = 3) -> torch.Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind, n, r, vocab_size", HEADS)
def test_the_distribution_is_the_authors(tmp_path, capsys, kind, n, r, vocab_size):
    state = authors.state_dict(kind, n, r, vocab_size, D)
    file = authors.save(tmp_path / "run", state, kind, n, r, vocab_size, D)
    out = convert(file, target(tmp_path, vocab_size))
    circuit = "ff" if (kind, r) == ("cp", 1) else kind
    assert f"({circuit}, window {n}, {r} components)" in capsys.readouterr().out
    expected = authors.distribution(state, kind, hidden())
    assert np.exp(expected).sum() == pytest.approx(1, abs=1e-12)
    assert np.abs(table(out, hidden()) - expected).max() < TOLERANCE
    config, _ = load_head(out)
    check_tensors(out, config)
    assert (config.circuit, config.window, config.num_components) == (circuit, n, r)
    assert (config.num_speculative_tokens, config.x1_from, config.lora_layers) == (n - 1, "verifier", 0)
    assert config.speculators_config.verifier.name_or_path == "../target"


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("n", [2, 4])
def test_biases_of_an_hmm_are_found_by_shape(tmp_path, n, bias):
    file = checkpoint(tmp_path, "hmm", n, bias=bias, identity="true")
    state = torch.load(file)["model_state_dict"]
    out = convert(file, target(tmp_path))
    expected = authors.distribution(state, "hmm", hidden(), bias)
    assert np.abs(table(out, hidden()) - expected).max() < TOLERANCE
    assert np.abs(authors.distribution(state, "hmm", hidden()) - expected).max() > 0.1
    record = inspect_head(out)["provenance"]["converted"]
    assert record["inner_bias"][f"inner_bias[{n - 2}]"] == bias.format(0)  # the deepest sum leads to the last token


def test_a_bias_without_a_number_is_taken_where_one_sum_fits(tmp_path):
    file = checkpoint(tmp_path, "hmm", 2, bias="mt_head.whatever", identity="true")
    state = torch.load(file)["model_state_dict"]
    out = convert(file, target(tmp_path))
    assert (
        np.abs(table(out, hidden()) - authors.distribution(state, "hmm", hidden(), "mt_head.whatever")).max()
        < TOLERANCE
    )


def test_a_bias_of_the_root_that_says_nothing_is_dropped(tmp_path):
    name = "mt_head._sum_weights_heads.{}.head.bias"
    extra = {name.format(2): torch.full((1, 1, 3), 0.5)}
    file = checkpoint(tmp_path, change=lambda state: state | extra, bias=name, identity="true")
    state = torch.load(file)["model_state_dict"]
    out = convert(file, target(tmp_path))
    assert np.abs(table(out, hidden()) - authors.distribution(state, "hmm", hidden(), name)).max() < TOLERANCE


@pytest.mark.parametrize("kind", ["cp", "hmm", "btree"])
def test_folds_are_put_in_the_order_of_positions(tmp_path, kind):
    """Leaves stored in any order, with a scope that says so; wiring is left out, which goes by stored folds."""
    order = [2, 0, 3, 1]

    def shuffle(state: dict) -> dict:
        state = {name: value for name, value in state.items() if "_in_fold_idx" not in name}
        return state | {name: state[name][order] for name in (authors.LEAF, authors.SCOPE)}

    file = checkpoint(tmp_path, kind, 4, change=shuffle)
    state = torch.load(file)["model_state_dict"]
    expected = authors.distribution(state, kind, hidden())
    assert np.abs(table(convert(file, target(tmp_path)), hidden()) - expected).max() < TOLERANCE
    assert np.abs(authors.distribution(state | {authors.SCOPE: torch.arange(4)}, kind, hidden()) - expected).max() > 0.1


@pytest.mark.parametrize("kind", ["cp", "hmm", "btree"])
def test_without_buffers_the_order_is_the_known_one(tmp_path, kind):
    whole = authors.state_dict(kind, 4, 3, 3, D)
    file = checkpoint(
        tmp_path, kind, 4, change=lambda state: {name: v for name, v in state.items() if not name.startswith("circuit")}
    )
    expected = authors.distribution(whole, kind, hidden())
    assert np.abs(table(convert(file, target(tmp_path)), hidden()) - expected).max() < TOLERANCE


def test_names_behind_wrappers_are_the_same(tmp_path):
    file = checkpoint(
        tmp_path, change=lambda state: {f"module._orig_mod.{name}": value for name, value in state.items()}
    )
    expected = authors.distribution(authors.state_dict("hmm", 3, 3, 3, D), "hmm", hidden())
    assert np.abs(table(convert(file, target(tmp_path)), hidden()) - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    "dtypes, kept",
    [
        ((torch.bfloat16, torch.bfloat16), "BF16"),
        ((torch.float32, torch.float32), "F32"),
        ((torch.bfloat16, torch.float32), "F32"),
        ((torch.bfloat16, torch.float16), "F32"),
    ],
)
def test_no_weight_is_rounded(tmp_path, dtypes, kept):
    def cast(state: dict) -> dict:
        state[authors.LEAF] = state[authors.LEAF].to(dtypes[0])
        return {name: value.to(dtypes[1]) if "_sum_" in name else value for name, value in state.items()}

    file = checkpoint(tmp_path, "btree", 4, change=cast)
    state = torch.load(file)["model_state_dict"]
    out = convert(file, target(tmp_path))
    assert inspect_head(out)["weights"]["dtypes"] == [kept]
    _, head = load_head(out)
    assert torch.equal(head.leaf_weight, state[authors.LEAF].float())
    assert torch.equal(head.root_weight, state[authors.SUM.format(1)][0, 0].float())


def test_a_folder_gives_its_last_step_and_what_is_known_is_recorded(tmp_path):
    file = checkpoint(tmp_path)
    torch.save({"model_state_dict": {}}, file.with_name("model@1000.pt.tmp"))
    torch.save({"model_state_dict": {}}, file.with_name("model@99.pt"))
    out = convert(file.parent, target(tmp_path), "--temperature", 0.7)
    record = inspect_head(out)["provenance"]["converted"]
    assert (record["from"], record["global_step"]) == ("model@900.pt", 900)
    assert (record["trained_on"], record["fold_order"]) == ("someone/a-byte-model", [2, 1, 0])
    assert load_head(out)[0].trained_temperature == 0.7
    assert str(tmp_path) not in (out / "provenance.json").read_text() + (out / "README.md").read_text()
    assert {"library_name", "pipeline_tag", "tags"} <= front_matter_of(out).keys()


def test_a_target_that_transformers_does_not_know(tmp_path):
    """Byte-level targets of this package: sizes are read off config.json, and no code of the folder is asked for."""
    (tmp_path / "target").mkdir()
    config = {"model_type": "no-such-model", "vocab_size": 3, "hidden_size": D, "architectures": ["X"]}
    config["auto_map"] = {"AutoConfig": "configuration_x.XConfig"}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    config, _ = load_head(convert(checkpoint(tmp_path), tmp_path / "target"))
    assert config.transformer_layer_config["model_type"] == "no-such-model"


def test_weights_of_the_target_are_left_out_and_said(tmp_path, capsys):
    extra = {"lm._lm.lm_head.weight": torch.ones(3, D)}
    out = convert(checkpoint(tmp_path, change=lambda state: state | extra), target(tmp_path))
    assert "lm._lm.lm_head.weight" in capsys.readouterr().err
    assert "lm_head" not in " ".join(load_head(out)[1].state_dict())


def without(word: str):
    return lambda state: {name: value for name, value in state.items() if word not in name}


def plus(**tensors):
    return lambda state: state | {f"mt_head.{name}": value for name, value in tensors.items()}


def changed(name: str, value):
    return lambda state: state | {name: value(state[name]) if callable(value) else value}


@pytest.mark.parametrize(
    "change, settings, words",
    [
        (without("_categorical"), {}, ["has no mt_head._categorical_log_probs_heads.0.head.proj"]),
        (without("_sum_weights_heads.1"), {}, ["sum heads of shapes", "hmm"]),
        (plus(_norm_weight=torch.ones(D)), {}, ["unknown", "mt_head._norm_weight (4,)"]),
        (plus(stacked=torch.ones(2, 3, 3)), {}, ["unknown", "mt_head.stacked (2, 3, 3)"]),
        (plus(shared=torch.ones(3, 3)), {}, ["mt_head.shared", "fits sum heads 0, 1", "_K"]),
        (plus(b_0=torch.ones(3, 3)), {}, ["sum heads 0 have a bias", "mt_head.b_0", "but 1 have none"]),
        (plus(b_0=torch.ones(3, 3), c_0=torch.eye(3)), {}, ["mt_head.c_0", "as mt_head.b_0 does"]),
        (plus(b_5=torch.ones(3, 3)), {}, ["unknown", "mt_head.b_5"]),
        (plus(b=torch.arange(3.0)), {}, ["mt_head.b is a bias of the root"]),
        (plus(b=torch.arange(3)), {}, ["unknown", "mt_head.b"]),
        (lambda state: state | {"extra.weight": torch.ones(2)}, {}, ["unknown", "extra.weight"]),
        (changed(authors.LEAF, lambda v: v[0]), {}, ["4 dimensions"]),
        (changed(authors.LEAF, lambda v: v.long()), {}, ["int64"]),
        (changed(authors.LEAF, lambda v: v * torch.nan), {}, ["NaN"]),
        (changed(authors.SCOPE, torch.tensor([[0], [0], [1]])), {}, ["_scope_idx = [0, 0, 1]"]),
        (changed(authors.SCOPE, torch.arange(3)[:, None]), {}, ["layer 1", "another order"]),
        (changed(authors.WIRING.format(4), torch.tensor([[0, 2]])), {}, ["layer 4", "[[0, 2]]", "[[0, 3]]"]),
        (None, {"identity": "true"}, ["init_hmm_identity", "no sum head has a bias"]),
        (None, {"n": 4}, ["(3, 3, 3, 4)", "(4, 3, 3, 4)", "config.yaml"]),
        (None, {"vocab_size": 5}, ["(3, 3, 5, 4)"]),
        (None, {"kind": "cp"}, ["sum heads of shapes"]),
        (None, {"kind": "random-btree"}, ["circuit.model.kind", "random-btree", "btree"]),
        (None, {"adaptor": "adaptor:\n  hyperparameters: {r: 16, lora_alpha: 16}"}, ["0 adapter tensors", "r = 16"]),
        (lambda state: [], {}, ["'model_state_dict'"]),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, capsys, change, settings, words):
    state = authors.state_dict("hmm", 3, 3, 3, D)
    sizes = {"kind": "hmm", "n": 3, "r": 3, "vocab_size": 3, "hidden_size": D}
    file = authors.save(tmp_path / "run", state if change is None else change(state), **(sizes | settings))
    text = refusal(file, target(tmp_path), capsys)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("type: evabyte", "type: vanilla", ["hyperparameters.type", "'vanilla'", "'evabyte'"]),
        ("expander_type: linear", "expander_type: mlp", ["expander_type", "mlp"]),
        ("transformer_n_layer: 0", "transformer_n_layer: 1", ["transformer_n_layer"]),
        ("share_sum_weights: false", "share_sum_weights: true", ["share_sum_weights"]),
        ("contextual_hmm_weights: true", "contextual_hmm_weights: false", ["contextual_hmm_weights"]),
        ("contextual_hmm_weights: true", "rotary: 3", ["unknown rotary"]),
        ("kind: hmm", "kind: hmm\n    n_mixing: 2", ["circuit.model", "unknown n_mixing"]),
        ("n_repetition: 1", "n_repetition: 2", ["n_repetition = 2"]),
        ("n_token: 3", "n_token: x", ["n_token = 'x'"]),
        ("n_token: ${circuit.n_token}", "n_token: ${oc.env:N}", ["circuit.model.n_token", "interpolations"]),
        ("n_token: ${circuit.n_token}", "n_token: ${nowhere.n}", ["circuit.model.n_token", "'nowhere.n' not found"]),
        ("name: byte", "name: [", ["config.yaml", "YAML"]),
    ],
)
def test_settings_that_are_not_known_are_refused_by_name(tmp_path, capsys, old, new, words):
    file = checkpoint(tmp_path)
    config = file.with_name("config.yaml")
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    text = refusal(file, target(tmp_path), capsys)
    assert all(word in text for word in words), text


def test_a_tree_over_an_odd_window_is_refused(tmp_path, capsys):
    state = authors.state_dict("btree", 3, 3, 3, D)
    file = authors.save(tmp_path / "run", state, "btree", 3, 3, 3, D)
    assert "btree over 3 tokens; allowed: 2, 4, 8" in refusal(file, target(tmp_path), capsys)


def test_the_target_is_the_one_it_was_trained_on(tmp_path, capsys):
    assert "V, D = 3, 4; the target has 5, 4" in refusal(checkpoint(tmp_path), target(tmp_path, 5), capsys)


def test_flags_of_ptp_checkpoints_are_refused(tmp_path, capsys):
    text = refusal(checkpoint(tmp_path), target(tmp_path), capsys, "--variant", "c-ptp", "--window", 4)
    assert "--variant, --window: of PTP checkpoints only" in text


def test_a_checkpoint_needs_its_config(tmp_path, capsys):
    file = checkpoint(tmp_path)
    file.with_name("config.yaml").unlink()
    assert "has no config.yaml" in refusal(file, target(tmp_path), capsys)
    file.unlink()
    assert "has no model@STEP.pt" in refusal(file.parent, target(tmp_path), capsys)
    assert "is not a file" in refusal(file, target(tmp_path), capsys)


class Planted:
    """Would leave a file behind if it were ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("key", ["optimizer_state_dict", "model_state_dict"])
def test_nothing_is_unpickled_but_tensors(tmp_path, capsys, key):
    file, planted = checkpoint(tmp_path), Planted(tmp_path / "ran")
    whole = torch.load(file)
    whole[key] = whole[key] | {"mt_head.planted": planted}
    torch.save(whole, file)
    assert "tensors alone" in refusal(file, target(tmp_path), capsys)
    assert not planted.path.exists()
    torch.load(file, weights_only=False)
    assert planted.path.exists()  # so it would have


def test_hub_names_are_downloaded_at_one_commit(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.hf_api import ModelInfo

    folder, asked = checkpoint(tmp_path).parent, []

    def info(self, repo: str) -> ModelInfo:
        names = ["config.yaml", "model@100.pt", "model@900.pt", "model@900.json"]
        return ModelInfo(id=repo, sha="c0ffee", siblings=[{"rfilename": name} for name in names])

    def download(repo: str, name: str, revision: str) -> str:
        asked.append((repo, name, revision))
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    out = convert("agrv/evabyte-hmm-n-3-r-3", target(tmp_path))
    assert asked == [("agrv/evabyte-hmm-n-3-r-3", name, "c0ffee") for name in ("config.yaml", "model@900.pt")]
    record = inspect_head(out)["provenance"]["converted"]
    assert record["from"] == "agrv/evabyte-hmm-n-3-r-3@c0ffee/model@900.pt"


def test_offline_a_hub_name_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = refusal("agrv/evabyte-mtpc-3e-4", target(tmp_path), capsys)
    assert "agrv/evabyte-mtpc-3e-4: not a file or folder here, and not to be had from the hub" in text
    assert "config.yaml into one folder" in text
