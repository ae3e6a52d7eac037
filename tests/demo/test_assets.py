"""The packaged demo assets are complete, loadable, and without paths of the machine that made them."""

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.demo import demo_heads
from vllm_mtpc import demo
from vllm_mtpc.checkpoint import load_head, resolve_verifier
from vllm_mtpc.checkpoint.ptp_head import load_ptp, load_student
from vllm_mtpc.hf import load_target


@pytest.mark.parametrize("name", dict.fromkeys([*demo.NAMES, *demo_heads.NAMES]))
def test_asset_is_complete_and_names_no_path_of_a_machine(name):
    folder = demo_heads.path(name)
    weights = ("adapter_model.safetensors", "u_embed.safetensors") if name in demo_heads.PTP else ("model.safetensors",)
    assert {"config.json", *weights, "README.md", "provenance.json"} <= {file.name for file in folder.iterdir()}
    for file in folder.iterdir():
        if file.suffix in (".json", ".md") and file.name != "tokenizer.json":
            text = file.read_text()
            assert not any(root in text for root in ("/home", "/root", "/tmp", "/work", "/usr", "://")), file.name


def test_tokens_are_bytes():
    tokenizer = AutoTokenizer.from_pretrained(demo.path("target"))
    text = "def f(x):\n\treturn 'é€🎉'  # \r\n\x00\x7f  end  "
    assert tokenizer.encode(text) == list(text.encode()) and tokenizer.decode(tokenizer.encode(text)) == text
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.bos_token_id) == (257, 256, 256)
    assert tokenizer.encode("a<|endoftext|>b") == [97, 256, 98]


def test_target_loads_in_float32_and_predicts_python():
    target = load_target(demo.path("target"))
    tokens = torch.tensor([list(b"import sys\nimport os\n\n\nclass Error(Exception):\n    def __init__(sel")])
    assert target.dtype == torch.float32 and target.logits(target.hidden(tokens))[0, -1].argmax() == ord("f")


@pytest.mark.parametrize("name", demo_heads.NAMES)
def test_head_loads_and_names_its_target(name):
    if name in demo_heads.PTP:
        config = load_ptp(demo_heads.path(name)).config
        student = load_student(demo_heads.path(name), load_target(demo.path("target"), torch.float32))
        read, zero = student.prefix(torch.tensor([list(b"import ")])), torch.zeros(1, dtype=torch.long)
        assert config.variant == name
        assert student.aux(read, zero, zero + 6, torch.full((1, 8), 0.25)).shape == (1, 8, config.hidden_size)
    else:
        config, head = load_head(demo_heads.path(name))
        assert config.circuit.kind == ("btree" if name == demo_heads.BACKBONE else name)
        assert {weight.dtype for weight in head.parameters()} == {torch.float32}
    verifier = config.speculators_config.verifier.name_or_path
    assert config.window == 8 and resolve_verifier(demo_heads.path(name), verifier) == str(demo.path("target"))
