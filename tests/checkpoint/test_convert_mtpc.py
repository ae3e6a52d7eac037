"""`vllm-mtpc convert` of MtPC checkpoints keeps the distribution and refuses other checkpoints."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import authors_mtpc as authors
from tests.support.convert_cases import convert, refusal
from tests.support.files import front_matter_of
from vllm_mtpc.checkpoint import check_tensors, load_head
from vllm_mtpc.checkpoint.inspect import inspect_head
from vllm_mtpc.heads.adapters import MODULES, DraftLayers
from vllm_mtpc.hf import Target

torch.set_num_threads(1)
V, D = 3, 4
# kind, n, r and V: tables of V ** n entries stay small.
HEADS = [
    ("cp", 3, 1, 3),  # the authors' cp of one component is ff here
    ("cp", 3, 3, 3),
    ("hmm", 2, 3, 3),
    ("hmm", 4, 3, 3),
    ("hmm", 4, 1, 3),
    ("btree", 2, 3, 3),
    ("btree", 4, 3, 3),
    ("btree", 4, 1, 3),
    ("btree", 8, 3, 2),
]
TOLERANCE = 1e-5  # nats: float32 sums of at most 8 logarithms and 3 ** 7 latents; a misplaced fold moves log p by 0.1
ROOT_BIAS = {"mt_head._sum_weights_heads.2.head.bias": torch.full((1, 1, 3), 0.5)}


def target(folder: Path, vocab_size: int = V, **values: object) -> Path:
    sizes = {"vocab_size": vocab_size, "hidden_size": D, "num_hidden_layers": 3, "num_attention_heads": 2} | values
    LlamaConfig(intermediate_size=6, num_key_value_heads=1, head_dim=2, **sizes).save_pretrained(folder / "target")
    return folder / "target"


def checkpoint(folder: Path, kind: str = "hmm", n: int = 3, r: int = 3, v: int = V, change=None, bias=None, **settings):
    """model@900.pt, its state dict changed by `change`."""
    state = authors.state_dict(kind, n, r, v, D, bias=bias)
    values = {"kind": kind, "n": n, "r": r, "vocab_size": v, "hidden_size": D} | settings
    return authors.save(folder / "run", state if change is None else change(state), **values)


def log_table(out: Path, hidden: torch.Tensor) -> np.ndarray:
    """log p of every window by the head in `out`."""
    config, head = load_head(out)
    tokens = torch.tensor(list(product(range(config.vocab_size), repeat=config.window)))
    with torch.no_grad():
        return head.circuit.log_prob(head(hidden.expand(len(tokens), -1)), tokens).double().numpy()


HIDDEN = torch.randn(D, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind, n, r, v", HEADS)
def test_distribution_equals_the_authors(tmp_path, capsys, kind, n, r, v):
    file = checkpoint(tmp_path, kind, n, r, v)
    out = convert(file, target(tmp_path, v))
    circuit = "ff" if (kind, r) == ("cp", 1) else kind
    assert f"({circuit}, window {n}, {r} components)" in capsys.readouterr().out
    expected = authors.distribution(torch.load(file)["model_state_dict"], kind, HIDDEN)
    assert np.exp(expected).sum() == pytest.approx(1, abs=1e-12)
    assert np.abs(log_table(out, HIDDEN) - expected).max() < TOLERANCE
    config, _ = load_head(out)
    check_tensors(out, config)
    assert (config.circuit, config.window, config.num_components) == (circuit, n, r)
    assert (config.num_speculative_tokens, config.x1_from, config.lora_layers) == (n - 1, "verifier", 0)
    assert config.speculators_config.verifier.name_or_path == "../target"


def without(word: str):
    return lambda state: {name: value for name, value in state.items() if word not in name}


def plus(**tensors):
    return lambda state: state | {f"mt_head.{name}": value for name, value in tensors.items()}


def changed(name: str, value):
    return lambda state: state | {name: value(state[name]) if callable(value) else value}


def shuffle(state: dict) -> dict:
    """Leaves in another order, with a matching scope; wiring refers to stored folds."""
    state = without("_in_fold_idx")(state)
    return state | {name: state[name][[2, 0, 3, 1]] for name in (authors.LEAF, authors.SCOPE)}


def wrap(state: dict) -> dict:
    return {f"module._orig_mod.{name}": value for name, value in state.items()}


@pytest.mark.parametrize(
    "kind, n, bias, change",
    [
        ("hmm", 2, "mt_head._sum_weights_heads.{}.head.bias", None),
        ("hmm", 4, "mt_head._sum_weights_heads.{}.head.bias", None),
        ("hmm", 4, "mt_head._hmm_biases.{}", None),
        ("hmm", 4, "mt_head.transition_{}", None),
        ("hmm", 2, "mt_head.whatever", None),  # one sum fits
        ("hmm", 3, "mt_head._sum_weights_heads.{}.head.bias", lambda state: state | ROOT_BIAS),  # no effect
        *((kind, 4, None, shuffle) for kind in ("cp", "hmm", "btree")),
        *((kind, 4, None, without("circuit")) for kind in ("cp", "hmm", "btree")),
        ("hmm", 3, None, wrap),
    ],
)
def test_biases_and_order_of_folds_are_read_from_tensors(tmp_path, kind, n, bias, change):
    whole = authors.state_dict(kind, n, 3, V, D, bias=bias)
    file = checkpoint(tmp_path, kind, n, change=change, bias=bias, identity="true" if bias else "false")
    state = torch.load(file)["model_state_dict"]
    known = whole if change in (wrap, None) or authors.SCOPE not in state else state
    expected = authors.distribution(known, kind, HIDDEN, bias)
    out = convert(file, target(tmp_path))
    assert np.abs(log_table(out, HIDDEN) - expected).max() < TOLERANCE
    if bias:
        assert np.abs(authors.distribution(known, kind, HIDDEN) - expected).max() > 0.1
        # the deepest sum leads to the last token
        assert inspect_head(out)["provenance"]["converted"]["inner_bias"][f"inner_bias[{n - 2}]"] == bias.format(0)


@pytest.mark.parametrize(
    "leaf, sums, kept",
    [
        (torch.bfloat16, torch.bfloat16, "BF16"),
        (torch.float32, torch.float32, "F32"),
        (torch.bfloat16, torch.float16, "F32"),
    ],
)
def test_no_weight_is_rounded(tmp_path, leaf, sums, kept):
    def cast(state: dict) -> dict:
        state[authors.LEAF] = state[authors.LEAF].to(leaf)
        return {name: value.to(sums) if "_sum_" in name else value for name, value in state.items()}

    file = checkpoint(tmp_path, "btree", 4, change=cast)
    state = torch.load(file)["model_state_dict"]
    out = convert(file, target(tmp_path))
    assert inspect_head(out)["weights"]["dtypes"] == [kept]
    _, head = load_head(out)
    assert torch.equal(head.leaf_weight, state[authors.LEAF].float())
    assert torch.equal(head.root_weight, state[authors.SUM.format(1)][0, 0].float())


def test_folder_gives_its_last_step_with_provenance(tmp_path, capsys):
    file = checkpoint(tmp_path, change=lambda state: state | {"lm._lm.lm_head.weight": torch.ones(3, D)})
    torch.save({"model_state_dict": {}}, file.with_name("model@1000.pt.tmp"))
    torch.save({"model_state_dict": {}}, file.with_name("model@99.pt"))
    out = convert(file.parent, target(tmp_path), "--temperature", 0.7)
    assert "left out: lm._lm.lm_head.weight" in capsys.readouterr().err
    record = inspect_head(out)["provenance"]["converted"]
    assert (record["from"], record["global_step"]) == ("model@900.pt", 900)
    assert (record["trained_on"], record["fold_order"]) == ("someone/a-byte-model", [2, 1, 0])
    assert load_head(out)[0].trained_temperature == 0.7
    assert str(tmp_path) not in (out / "provenance.json").read_text() + (out / "README.md").read_text()
    assert {"library_name", "pipeline_tag", "tags"} <= front_matter_of(out).keys()


def test_target_unknown_to_transformers_is_read_from_config_json(tmp_path):
    """Byte-level targets of this package: no code of the folder runs."""
    (tmp_path / "target").mkdir()
    config = {"model_type": "no-such-model", "vocab_size": 3, "hidden_size": D, "architectures": ["X"]}
    config["auto_map"] = {"AutoConfig": "configuration_x.XConfig"}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    config, _ = load_head(convert(checkpoint(tmp_path), tmp_path / "target"))
    assert config.transformer_layer_config["model_type"] == "no-such-model"


@pytest.mark.parametrize(
    "change, settings, words",
    [
        (without("_categorical"), {}, ["has no mt_head._categorical_log_probs_heads.0.head.proj"]),
        (without("_sum_weights_heads.1"), {}, ["sum heads of shapes", "hmm"]),
        (plus(_norm_weight=torch.ones(D)), {}, ["unknown", "mt_head._norm_weight (4,)"]),
        (plus(stacked=torch.ones(2, 3, 3)), {}, ["unknown", "mt_head.stacked (2, 3, 3)"]),
        (plus(shared=torch.ones(3, 3)), {}, ["mt_head.shared", "fits sum heads 0, 1", "_K"]),
        (plus(b_0=torch.ones(3, 3)), {}, ["sum heads 0 have a bias", "mt_head.b_0", "but 1 have none"]),
        (plus(b_0=torch.ones(3, 3), c_0=torch.eye(3)), {}, ["mt_head.c_0", "not the only bias"]),
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
        (None, {"n": 4}, ["(3, 3, 3, 4)", "(4, 3, 3)", "config.yaml"]),
        (None, {"vocab_size": 5}, ["(3, 3, 5)"]),
        (None, {"kind": "cp"}, ["sum heads of shapes"]),
        (None, {"kind": "btree"}, ["btree over 3 tokens; allowed: 2, 4, 8"]),
        (None, {"kind": "random-btree"}, ["circuit.model", "'kind' = 'random-btree'", "btree"]),
        (None, {"adaptor": "adaptor:\n  hyperparameters: {r: 16, lora_alpha: 16}"}, ["0 adapter tensors", "r=16"]),
        (lambda state: [], {}, ["'model_state_dict'"]),
        # lines of config.yaml
        (None, {"edit": ("type: evabyte", "type: vanilla")}, ["hyperparameters", "'type' = 'vanilla'", "'evabyte'"]),
        (None, {"edit": ("expander_type: linear", "expander_type: mlp")}, ["expander_type", "mlp"]),
        (None, {"edit": ("transformer_n_layer: 0", "transformer_n_layer: 1")}, ["transformer_n_layer"]),
        (None, {"edit": ("share_sum_weights: false", "share_sum_weights: true")}, ["share_sum_weights = True"]),
        (None, {"edit": ("contextual_hmm_weights: true", "contextual_hmm_weights: false")}, ["contextual_hmm_weights"]),
        (None, {"edit": ("contextual_hmm_weights: true", "rotary: 3")}, ["unknown key 'rotary'"]),
        (None, {"edit": ("kind: hmm", "kind: hmm\n    n_mixing: 2")}, ["circuit.model", "unknown key 'n_mixing'"]),
        (None, {"edit": ("n_repetition: 1", "n_repetition: 2")}, ["'n_repetition' = 2"]),
        (None, {"edit": ("n_token: 3", "n_token: x")}, ["'n_token' = 'x'"]),
        (None, {"edit": ("n_token: ${circuit.n_token}", "n_token: ${oc.env:N}")}, ["n_token", "interpolations"]),
        (None, {"edit": ("n_token: ${circuit.n_token}", "n_token: ${nowhere.n}")}, ["'nowhere.n' not found"]),
        (None, {"edit": ("name: byte", "name: [")}, ["config.yaml", "YAML"]),
    ],
)
def test_unsupported_checkpoint_is_refused_by_name(tmp_path, capsys, change, settings, words):
    edit = settings.pop("edit", None)
    state = authors.state_dict("hmm", 3, 3, 3, D)
    sizes = {"kind": "hmm", "n": 3, "r": 3, "vocab_size": 3, "hidden_size": D}
    file = authors.save(tmp_path / "run", state if change is None else change(state), **(sizes | settings))
    if edit:
        config = file.with_name("config.yaml")
        assert edit[0] in config.read_text()
        config.write_text(config.read_text().replace(*edit))
    text = refusal(file, target(tmp_path), capsys)
    assert all(word in text for word in words), text


def test_missing_file_other_target_and_foreign_flags_are_refused(tmp_path, capsys):
    file, place = checkpoint(tmp_path), target(tmp_path)
    text = refusal(file, place, capsys, "--variant", "c-ptp", "--window", 4)
    assert "--variant, --window: for PTP checkpoints only" in text
    assert "V, D = 3, 4; the target has 5, 4" in refusal(file, target(tmp_path, 5), capsys)
    file.with_name("config.yaml").unlink()
    assert "has no config.yaml" in refusal(file, place, capsys)
    file.unlink()
    assert "has no model@STEP.pt" in refusal(file.parent, place, capsys)
    assert "is not a file" in refusal(file, place, capsys)


class Planted:
    """Leaves a file if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("key", ["optimizer_state_dict", "model_state_dict"])
def test_pickled_code_never_runs(tmp_path, capsys, key):
    file, planted = checkpoint(tmp_path), Planted(tmp_path / "ran")
    whole = torch.load(file)
    whole[key] = whole[key] | {"mt_head.planted": planted}
    torch.save(whole, file)
    assert "tensors alone" in refusal(file, target(tmp_path), capsys)
    assert not planted.path.exists()
    torch.load(file, weights_only=False)
    assert planted.path.exists()  # the control


def test_hub_name_is_downloaded_at_one_commit(tmp_path, capsys, monkeypatch):
    import huggingface_hub
    from huggingface_hub.hf_api import ModelInfo

    folder, asked = checkpoint(tmp_path).parent, []

    def info(self, repo: str) -> ModelInfo:
        names = ["config.yaml", "model@100.pt", "model@900.pt", "model@900.json"]
        return ModelInfo(id=repo, sha="c0ffee", siblings=[{"rfilename": name} for name in names])

    def download(repo: str, name: str, revision: str) -> str:
        asked.append((repo, name, revision))
        return str(folder / name)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = refusal("agrv/evabyte-mtpc-3e-4", target(tmp_path), capsys)
    assert "agrv/evabyte-mtpc-3e-4: not a local file or folder, and cannot be downloaded" in text
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    out = convert("agrv/evabyte-hmm-n-3-r-3", target(tmp_path))
    assert asked == [("agrv/evabyte-hmm-n-3-r-3", name, "c0ffee") for name in ("config.yaml", "model@900.pt")]
    record = inspect_head(out)["provenance"]["converted"]
    assert record["from"] == "agrv/evabyte-hmm-n-3-r-3@c0ffee/model@900.pt"


# ---- adapters -------------------------------------------------------------------------------------

LAYERS = dict(vocab_size=7, hidden_size=8, intermediate_size=12, num_hidden_layers=3)
LLAMA = LlamaConfig(**LAYERS, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
ADAPTOR = """\
adaptor:
  name: lora-last-2
  hyperparameters:
    r: 2
    lora_alpha: 6
    lora_dropout: 0.0
    target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]
    layers_to_transform: ${{lm.last_{layers}_layers}}"""


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LLAMA).eval().requires_grad_(False)


def adapted_model(layers: list[int]):
    lora = LoraConfig(r=2, lora_alpha=6, target_modules=list(MODULES), layers_to_transform=layers)
    model = get_peft_model(llama(), lora).eval()
    torch.manual_seed(1)
    for name, value in model.named_parameters():
        if ".lora_" in name:
            value.data.normal_()
    return model


def adapted_checkpoint(folder: Path, model, layers: int, change=None, line: str = "") -> Path:
    """A head with the model's adapters, in the authors' layout: None for weights that were not trained."""
    LLAMA.save_pretrained(folder / "target")
    state = authors.state_dict("btree", 4, 3, 7, 8)
    state |= {f"lm._lm.{name}": value if ".lora_" in name else None for name, value in model.state_dict().items()}
    adaptor = ADAPTOR.format(layers=layers) + line
    return authors.save(folder / "run", change(state) if change else state, "btree", 4, 3, 7, 8, adaptor=adaptor)


@pytest.mark.parametrize("layers", [[2], [1, 2]])
def test_draft_layers_give_the_states_of_the_adapted_model(tmp_path, layers):
    model, plain = adapted_model(layers), llama()
    out = convert(adapted_checkpoint(tmp_path, model, len(layers)), tmp_path / "target")
    config, _ = load_head(out)
    check_tensors(out, config)
    assert config.lora_layers == len(layers)
    draft = DraftLayers.load(out, Target("llama", plain, None, plain.model, plain.lm_head, "torch"))
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        expected = model(tokens, output_hidden_states=True).hidden_states[-1]
        # float32; the same products, in PEFT's or our views
        assert torch.allclose(draft(draft.trunk(tokens)), expected, atol=1e-5)
        assert not torch.allclose(plain(tokens, output_hidden_states=True).hidden_states[-1], expected, atol=0.1)
    assert inspect_head(out)["adapters"]["layers"] == layers
    values = json.loads((out / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["layers_to_transform"]) == (2, 6, layers)
    assert values["base_model_name_or_path"] == "../target"


def renamed(old: str, new: str):
    return lambda state: {name.replace(old, new): value for name, value in state.items()}


@pytest.mark.parametrize(
    "layers, stated, change, line, words",
    [
        ([1], 2, None, "", ["adapters on layers [1] of 3", "the last 1, 2, 4 layers"]),
        ([0, 1, 2], 2, None, "", ["layers [0, 1, 2] of 3"]),
        ([1, 2], 1, None, "", ["config.yaml has [2]"]),
        ([1, 2], 2, None, "\n    use_rslora: true", ["unknown key 'use_rslora'"]),
        ([1, 2], 2, without("layers.2.mlp.up_proj.lora_B"), "", ["missing", "layers.2.mlp.up_proj.lora_B"]),
        ([1, 2], 2, renamed("lora_A.default.weight", "lora_magnitude_vector.default"), "", ["lora_magnitude_vector"]),
        ([1, 2], 2, renamed("q_proj.lora_", "rotary.lora_"), "", ["adapters of rotary", "q_proj"]),
        ([1, 2], 2, renamed("default.weight", "other.weight"), "", ["other.weight"]),
        ([1, 2], 2, without(".lora_"), "", ["0 adapter tensors", "r=2"]),
        (
            [1, 2],
            2,
            lambda state: {n: v[:1] if v is not None and ".lora_A" in n else v for n, v in state.items()},
            "",
            ["expected: (2, "],
        ),
        (
            [1, 2],
            2,
            lambda state: state | {"lm._lm.base_model.model.lm_head.modules_to_save.default.weight": torch.ones(7, 8)},
            "",
            ["modules_to_save"],
        ),
    ],
)
def test_unsupported_adapters_are_refused(tmp_path, capsys, layers, stated, change, line, words):
    file = adapted_checkpoint(tmp_path, adapted_model(layers), stated, change, line)
    text = refusal(file, tmp_path / "target", capsys)
    assert all(word in text for word in words), text


def test_adapters_of_a_shallower_target_are_refused(tmp_path, capsys):
    file = adapted_checkpoint(tmp_path, adapted_model([1, 2]), 2)
    LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": 4}).save_pretrained(tmp_path / "target")
    assert "layers [1, 2] of 4" in refusal(file, tmp_path / "target", capsys)
