"""`vllm-mtpc convert` of MtPC checkpoints keeps the distribution and refuses other checkpoints."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from tests.checkpoint.conftest import LLAMA, adapted_llama, convert, convert_refusal, converted_from, llama
from tests.support import authors_mtpc as authors
from tests.support.files import front_matter_of
from vllm_mtpc.checkpoint import check_tensors, load_head
from vllm_mtpc.heads.trunk.lora import LoraDraftLayers
from vllm_mtpc.hf import Target

torch.set_num_threads(1)
V, D = 3, 4
TOLERANCE = 1e-5  # nats: float32 sums of at most 8 logarithms and 3 ** 7 latents; a misplaced fold moves log p by 0.1
HIDDEN = torch.randn(D, generator=torch.Generator().manual_seed(3))


def target(folder: Path, vocab_size: int = V, **values: object) -> Path:
    sizes = {"vocab_size": vocab_size, "hidden_size": D, "num_hidden_layers": 3, "num_attention_heads": 2} | values
    LlamaConfig(intermediate_size=6, num_key_value_heads=1, head_dim=2, **sizes).save_pretrained(folder / "target")
    return folder / "target"


def checkpoint(folder: Path, kind: str = "hmm", n: int = 3, r: int = 3, v: int = V, change=None, **settings) -> Path:
    """model@900.pt, its state dict changed by `change`; edit: (old, new) text in config.yaml."""
    state = authors.state_dict(kind, n, r, v, D, has_bias=settings.get("identity") == "true")
    values = {"kind": kind, "n": n, "r": r, "vocab_size": v, "hidden_size": D} | settings
    edit = values.pop("edit", None)
    file = authors.save(folder / "run", state if change is None else change(state), **values)
    if edit:
        text = file.with_name("config.yaml").read_text()
        assert edit[0] in text
        file.with_name("config.yaml").write_text(text.replace(*edit))
    return file


def log_table(out: Path) -> np.ndarray:
    """log p of every window by the head in `out`."""
    config, head = load_head(out)
    check_tensors(out, config)
    tokens = torch.tensor(list(product(range(config.vocab_size), repeat=config.window)))
    with torch.no_grad():
        return head.circuit.log_prob(head(HIDDEN.expand(len(tokens), -1), tokens[:, 0]), tokens).double().numpy()


def shuffle(state: dict) -> dict:
    """Leaves in another order, with a matching scope."""
    return state | {name: state[name][[2, 0, 3, 1]] for name in (authors.LEAF, authors.SCOPE)}


def wrap(state: dict) -> dict:
    return {f"module._orig_mod.{name}": value for name, value in state.items()}


@pytest.mark.parametrize(
    "kind, n, r, v, change",
    [
        *(("cp", 3, r, 3, None) for r in (1, 3)),  # the authors' cp of one component is ff here
        *((kind, n, r, 3, None) for kind in ("hmm", "btree") for n, r in ((2, 3), (4, 3), (4, 1))),
        ("btree", 8, 3, 2, None),
        *((kind, 4, 3, 3, shuffle) for kind in ("cp", "hmm", "btree")),
        ("hmm", 3, 3, 3, wrap),
    ],
)
def test_distribution_equals_the_authors(tmp_path, capsys, kind, n, r, v, change):
    file = checkpoint(tmp_path, kind, n, r, v, None if change is wrap else change)
    expected = authors.distribution(torch.load(file)["model_state_dict"], kind, HIDDEN)
    assert np.exp(expected).sum() == pytest.approx(1, abs=1e-12)
    out = convert(checkpoint(tmp_path, kind, n, r, v, change), target(tmp_path, v))
    circuit = "ff" if (kind, r) == ("cp", 1) else kind
    assert f"({circuit}, window {n}, {r} components)" in capsys.readouterr().out
    assert np.abs(log_table(out) - expected).max() < TOLERANCE
    config, _ = load_head(out)
    assert (config.circuit.kind, config.window, config.num_components) == (circuit, n, r)
    assert (config.num_speculative_tokens, config.lora_layers) == (n - 1, 0)
    assert config.speculators_config.verifier.name_or_path == "../target"


@pytest.mark.parametrize("n", [2, 4])
def test_biases_of_an_hmm_are_read(tmp_path, n):
    file = checkpoint(tmp_path, n=n, identity="true")
    state = torch.load(file)["model_state_dict"]
    expected = authors.distribution(state, "hmm", HIDDEN)
    assert np.abs(log_table(convert(file, target(tmp_path))) - expected).max() < TOLERANCE
    assert np.abs(authors.distribution(without(".bias")(state), "hmm", HIDDEN) - expected).max() > 0.1


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize("leaf, sums, kept", [(HALF, HALF, HALF), (FULL, FULL, FULL), (HALF, torch.float16, FULL)])
def test_no_weight_is_rounded(tmp_path, leaf, sums, kept):
    def cast(state: dict) -> dict:
        state[authors.LEAF] = state[authors.LEAF].to(leaf)
        return {name: value.to(sums) if "_sum_" in name else value for name, value in state.items()}

    file = checkpoint(tmp_path, "btree", 4, change=cast)
    state = torch.load(file)["model_state_dict"]
    out = convert(file, target(tmp_path))
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {kept}
    _, head = load_head(out)
    assert torch.equal(head.leaves.leaf_weight, state[authors.LEAF].float())
    assert torch.equal(head.root_weight, state[authors.SUM.format(1)][0, 0].float())


def test_folder_gives_its_last_step_with_provenance(tmp_path, capsys):
    file = checkpoint(tmp_path, change=lambda state: state | {"lm._lm.lm_head.weight": torch.ones(3, D)})
    torch.save({"model_state_dict": {}}, file.with_name("model@1000.pt.tmp"))
    torch.save({"model_state_dict": {}}, file.with_name("model@99.pt"))
    out = convert(file.parent, target(tmp_path))
    assert "left out: lm._lm.lm_head.weight" in capsys.readouterr().err
    record = converted_from(out)
    assert (record["from"], record["global_step"]) == ("model@900.pt", 900)
    assert record["trained_on"] == "someone/a-byte-model"
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


def without(word: str):
    return lambda state: {name: value for name, value in state.items() if word not in name}


def changed(name: str, value):
    return lambda state: state | {name: value(state[name]) if callable(value) else value}


@pytest.mark.parametrize(
    "change, settings, words",
    [
        (without("_categorical"), {}, [f"missing: {authors.LEAF}"]),
        (changed("mt_head._norm_weight", torch.ones(D)), {}, ["unknown", "mt_head._norm_weight"]),
        (changed("mt_head.norm", {}), {}, ["mt_head.norm is a dict, not a tensor"]),
        (changed(authors.BIAS.format(0), torch.ones(1, 3, 3)), {}, ["missing: mt_head._sum_weights_heads.1.head.bias"]),
        (changed(authors.BIAS.format(2), torch.ones(1, 1, 3)), {}, ["unknown", "heads.2.head.bias"]),  # of the root
        (changed(authors.LEAF, lambda v: v * torch.nan), {}, ["NaN"]),
        (changed(authors.SCOPE, torch.tensor([[0], [0], [1]])), {}, ["_scope_idx = [0, 0, 1]"]),
        (None, {"n": 4, "edit": ("n_token: 4", "n_token: 3")}, ["unknown", "heads.3.head.proj"]),
        (None, {"edit": ("kind: hmm", "kind: btree")}, ["btree over 3 tokens; allowed: 2, 4, 8"]),
        (None, {"edit": ("kind: hmm", "kind: random-btree")}, ["circuit.model", "'kind' = 'random-btree'", "btree"]),
        (None, {"adaptor": "adaptor:\n  hyperparameters: {r: 16, lora_alpha: 16}"}, ["0 adapter tensors", "r=16"]),
        (None, {"edit": ("type: evabyte", "type: vanilla")}, ["hyperparameters", "'type' = 'vanilla'", "'evabyte'"]),
        (None, {"edit": ("contextual_hmm_weights: true", "rotary: 3")}, ["unknown key 'rotary'"]),
        (None, {"edit": ("n_token: ${circuit.n_token}", "n_token: ${oc.env:N}")}, ["n_token", "${oc.env:N}"]),
        (None, {"edit": ("n_token: ${circuit.n_token}", "n_token: ${nowhere.n}")}, ["'n_token' is missing"]),
        (None, {"edit": ("name: byte", "name: [")}, ["config.yaml", "YAML"]),
    ],
)
def test_unsupported_checkpoint_is_refused_by_name(tmp_path, capsys, change, settings, words):
    text = convert_refusal(checkpoint(tmp_path, change=change, **settings), target(tmp_path), capsys)
    assert all(word in text for word in words), text


def test_other_target_and_missing_settings_are_refused(tmp_path, capsys):
    file = checkpoint(tmp_path)
    assert "(3, 3, 3, 4); expected: (3, 3, 5, 4)" in convert_refusal(file, target(tmp_path, 5), capsys)
    file.with_name("config.yaml").unlink()
    assert "has no config.yaml" in convert_refusal(file, target(tmp_path), capsys)


# ---- adapters -------------------------------------------------------------------------------------

ADAPTOR = """\
adaptor:
  name: lora-last-2
  hyperparameters:
    r: 2
    lora_alpha: 6
    lora_dropout: 0.0
    target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]
    layers_to_transform: ${{lm.last_{layers}_layers}}"""


def adapted_checkpoint(folder: Path, layers: list[int], stated: int = 2, change=None, line: str = "") -> Path:
    """A head with the model's adapters, in the authors' layout: None for weights that were not trained."""
    LLAMA.save_pretrained(folder / "target")
    model = adapted_llama(1, layers, lora_alpha=6)
    state = authors.state_dict("btree", 4, 3, 7, 8)
    state |= {f"lm._lm.{name}": value if ".lora_" in name else None for name, value in model.state_dict().items()}
    adaptor = ADAPTOR.format(layers=stated) + line
    return authors.save(folder / "run", change(state) if change else state, "btree", 4, 3, 7, 8, adaptor=adaptor)


@pytest.mark.parametrize("layers", [[2], [1, 2]])
def test_draft_layers_give_the_states_of_the_adapted_model(tmp_path, layers):
    plain, tokens = llama(), torch.arange(7)[None]
    out = convert(adapted_checkpoint(tmp_path, layers, len(layers)), tmp_path / "target")
    config, _ = load_head(out)
    adapters = check_tensors(out, config)
    assert config.lora_layers == len(layers)
    draft = LoraDraftLayers.load(adapters, Target("llama", plain, None, plain.model, plain.lm_head, "torch"))
    with torch.no_grad():
        expected = adapted_llama(1, layers, lora_alpha=6)(tokens, output_hidden_states=True).hidden_states[-1]
        # float32; the same products, in PEFT's or our views
        assert torch.allclose(draft.draft(draft.trunk(tokens)), expected, atol=1e-5)
        assert not torch.allclose(plain(tokens, output_hidden_states=True).hidden_states[-1], expected, atol=0.1)
    values = json.loads((out / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["layers_to_transform"]) == (2, 6, layers)
    assert values["base_model_name_or_path"] == "../target"


def renamed(old: str, new: str):
    return lambda state: {name.replace(old, new): value for name, value in state.items()}


def shorter(state: dict) -> dict:
    return {name: v[:1] if v is not None and ".lora_A" in name else v for name, v in state.items()}


@pytest.mark.parametrize(
    "layers, stated, change, line, words",
    [
        ([1], 2, None, "", ["adapters on layers [1] of 3", "the last 1, 2, 4 layers"]),
        ([1, 2], 1, None, "", ["config.yaml has [2]"]),
        ([1, 2], 2, None, "\n    use_rslora: true", ["unknown key 'use_rslora'"]),
        ([1, 2], 2, without("layers.2.mlp.up_proj.lora_B"), "", ["missing", "layers.2.mlp.up_proj.lora_B"]),
        ([1, 2], 2, renamed("lora_A.default.weight", "lora_magnitude_vector.default"), "", ["lora_magnitude_vector"]),
        ([1, 2], 2, shorter, "", ["expected: (2, "]),
        ([1, 2], 2, changed("lm._lm.lm_head.modules_to_save", torch.ones(7)), "", ["modules_to_save"]),
    ],
)
def test_unsupported_adapters_are_refused(tmp_path, capsys, layers, stated, change, line, words):
    file = adapted_checkpoint(tmp_path, layers, stated, change, line)
    text = convert_refusal(file, tmp_path / "target", capsys)
    assert all(word in text for word in words), text
