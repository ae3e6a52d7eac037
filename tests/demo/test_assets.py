"""The packaged demo assets are complete, loadable, and without paths of the machine that made them."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_mtpc import demo
from vllm_mtpc.checkpoint import load_head, resolve_verifier
from vllm_mtpc.checkpoint.ptp_head import load_ptp, load_student
from vllm_mtpc.hf import load_target
from vllm_mtpc.train.ptp.ptp_trainer import SHUFFLE_COST


def figures(name: str) -> dict[str, dict]:
    return json.loads((demo.path(name) / "provenance.json").read_text())["figures"]


@pytest.mark.parametrize("name", demo.NAMES)
def test_asset_is_complete_and_names_no_path_of_a_machine(name):
    folder = demo.path(name)
    weights = ("adapter_model.safetensors", "u_embed.safetensors") if name in demo.PTP else ("model.safetensors",)
    assert {"config.json", *weights, "README.md", "provenance.json"} <= {file.name for file in folder.iterdir()}
    for file in folder.iterdir():
        if file.suffix in (".json", ".md") and file.name != "tokenizer.json":
            text = file.read_text()
            assert not any(root in text for root in ("/home", "/root", "/tmp", "/work", "/usr", "://")), file.name


def names_its_target(name, config):
    verifier = config.speculators_config.verifier.name_or_path
    return verifier == "../target" and resolve_verifier(demo.path(name), verifier) == str(demo.path("target"))


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"'tree' does not exist: use one of target, .*, backbone, o-ptp, c-ptp, late"):
        demo.path("tree")


def test_import_does_not_load_torch():
    code = "import sys, vllm_mtpc.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tokens_are_bytes():
    tokenizer = AutoTokenizer.from_pretrained(demo.path("target"))
    text = "def f(x):\n\treturn 'é€🎉'  # \r\n\x00\x7f  end  "
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(list(range(32, 127))) == bytes(range(32, 127)).decode()
    assert len(tokenizer) == 257
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (256, 256)
    assert tokenizer.encode("a<|endoftext|>b") == [97, 256, 98]


def test_target_loads_in_float32_and_predicts_python():
    model = AutoModelForCausalLM.from_pretrained(demo.path("target"), dtype=torch.float32)
    assert model.config.dtype == torch.float32
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in model.state_dict().values())
    tokens = torch.tensor([list(b"import sys\nimport os\n\n\nclass Error(Exception):\n    def __init__(sel")])
    with torch.no_grad():
        assert model(tokens).logits[0, -1].argmax() == ord("f")


@pytest.mark.parametrize("name", demo.CIRCUITS)
def test_heads_load_and_name_their_target(name):
    config, head = load_head(demo.path(name))
    assert (config.circuit, config.window) == (name, 8) and names_its_target(name, config)
    assert {weight.dtype for weight in head.parameters()} == {torch.float32}
    assert head(torch.zeros(2, config.hidden_size)).leaf.shape == (2, 8, config.num_components, 257)


def test_backbone_and_btree_have_more_tokens_per_step():
    config, _ = load_head(demo.path(demo.BACKBONE))
    assert (config.head, config.circuit, config.window, config.token_rank) == ("backbone", "btree", 8, 32)
    assert names_its_target(demo.BACKBONE, config)
    for temperature in ("t1", "t0"):
        measured = {name: figures(name)[temperature] for name in (*demo.CIRCUITS, demo.BACKBONE)}
        assert all(one["contexts"] >= 1000 for one in measured.values())
        found = {name: one["tokens_per_step"] for name, one in measured.items()}
        assert found.pop(demo.BACKBONE) > 1.05 * max(found.values())
    assert figures("btree")["t1"]["tokens_per_step"] >= 1.2 * figures("ff")["t1"]["tokens_per_step"]


@pytest.mark.parametrize("name", demo.PTP)
def test_ptp_heads_fit_their_target_and_read_u(name):
    """The recorded drafts are worse with the u of other windows."""
    config = load_ptp(demo.path(name)).config
    assert (config.variant, config.window, config.uses_u, len(config.accepted)) == (name, 8, True, 8)
    assert names_its_target(name, config)
    student = load_student(demo.path(name), load_target(demo.path("target"), torch.float32))
    read = student.prefix(torch.tensor([list(b"import ")]))
    zero = torch.zeros(1, dtype=torch.long)
    assert student.aux(read, zero, zero + 6, torch.full((1, 8), 0.25)).shape == (1, 8, config.hidden_size)
    found = figures(name)["t1"]
    # the trainer's threshold; c-ptp misses it, because on this target its rows learn the marginals
    assert (found["shuffled_accuracy"] < (1 - SHUFFLE_COST) * found["accuracy"]) == (name != "c-ptp")
