"""`vllm-mtpc convert` of PTP checkpoints in both layouts of the authors keeps the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.convert_cases import convert, refusal
from tests.support.files import front_matter_of
from vllm_mtpc.checkpoint import load_ptp
from vllm_mtpc.checkpoint.convert.ptp_checkpoint import accepted_drafts
from vllm_mtpc.checkpoint.inspect import inspect_head
from vllm_mtpc.cli import main
from vllm_mtpc.heads.adapters import MODULES

torch.set_num_threads(1)
LLAMA = LlamaConfig(
    vocab_size=7,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)
# The authors' names of the tensors, by our name of the embedding.
EMBEDDINGS = {
    "ieee": {"u_adapter.weight": (8, 32), "u_adapter.bias": (8,)},
    "interpolation": {"embedding.weight": (3, 8)},
}
PREFIXES = {"official": ("model.model.", "model.u_embed."), "fork": ("student.model.", "student.u_adapter.")}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LLAMA).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def student() -> PeftModel:
    """PEFT's own model with random adapters, alpha left at PEFT's default as the authors do."""
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=list(MODULES))).eval()
    torch.manual_seed(1)
    for name, value in model.named_parameters():
        if ".lora_" in name:
            value.data.normal_()
    return model


@pytest.fixture
def target(tmp_path: Path) -> Path:
    LLAMA.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def tensors(student: PeftModel):
    """The state_dict of a checkpoint."""

    def build(layout: str = "official", embedding: str = "ieee", full: bool = True) -> dict[str, torch.Tensor]:
        model, u_embed = PREFIXES[layout]
        torch.manual_seed(2)
        state = {f"{model}{name}": value for name, value in student.state_dict().items() if full or ".lora_" in name}
        state |= {f"{u_embed}{name}": torch.randn(shape) for name, shape in EMBEDDINGS[embedding].items()}
        if layout == "fork":
            state |= {f"teacher.model.{name}": value for name, value in llama().state_dict().items()}
        return state

    return build


def write(file: Path, state: dict, **more: object) -> Path:
    torch.save({"state_dict": state, "epoch": 140, "global_step": 9, "hyper_parameters": {"lr": 1e-4}} | more, file)
    return file


@pytest.mark.parametrize("layout, full", [("official", True), ("fork", True), ("fork", False)])
def test_adapters_and_embedding_of_both_layouts(tmp_path, target, tensors, student, capsys, layout, full):
    """The converted adapters on the plain target give the logits of the model the checkpoint was made of."""
    state = tensors(layout, full=full)
    out = convert(write(tmp_path / "epoch=140.ckpt", state), target, "--temperature", 0.7, "--top-k", 50)
    assert str(out) in capsys.readouterr().out
    config, lora, embedding, late = load_ptp(out)
    assert (config.variant, config.window, config.u_embedding) == ("o-ptp", 16, "ieee")
    assert (config.num_speculative_tokens, config.lora_rank, config.lora_alpha, config.accepted) == (15, 4, 8.0, None)
    assert (config.trained_temperature, config.trained_top_k, config.trained_top_p) == (0.7, 50, 1.0)
    assert config.speculators_config.verifier.name_or_path == "../target"
    assert len(lora) == 2 * 7 * 2 and late is None
    prefix = PREFIXES[layout][1]
    assert torch.equal(embedding.outer.weight, state[f"{prefix}u_adapter.weight"])
    assert torch.equal(embedding.outer.bias, state[f"{prefix}u_adapter.bias"])
    tokens = torch.arange(7)[None]
    expected = student(tokens).logits
    assert torch.equal(PeftModel.from_pretrained(llama(), out).eval()(tokens).logits, expected)
    assert not torch.allclose(llama()(tokens).logits, expected)
    record = inspect_head(out)["provenance"]["converted"]
    assert (record["from"], record["layout"], record["epoch"]) == ("epoch=140.ckpt", layout, 140)
    assert str(tmp_path) not in (out / "provenance.json").read_text() + (out / "README.md").read_text()
    assert {"library_name", "pipeline_tag", "tags"} <= front_matter_of(out).keys()


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embedding_is_matched_by_its_tensors(tmp_path, target, tensors, capsys, name):
    state = tensors("fork", name, full=False)
    head = load_ptp(convert(write(tmp_path / "a.ckpt", state), target))
    assert head.config.u_embedding == name
    given = [value for key, value in state.items() if key.startswith(PREFIXES["fork"][1])]
    assert all(torch.equal(*pair) for pair in zip(head.embedding.state_dict().values(), given, strict=True))


def test_unsupported_embedding_is_refused(tmp_path, target, tensors, capsys):
    """`round` has 32 learned rows; read as `interpolation` it would give other drafts."""
    state = tensors("official", "interpolation", full=False)
    state["model.u_embed.embedding.weight"] = torch.zeros(32, 8)
    assert "their `round`, which is not supported" in refusal(write(tmp_path / "a.ckpt", state), target, capsys)


@pytest.mark.parametrize(
    "dtype, kept", [(torch.float16, "F16"), (torch.float32, "F32"), (torch.bfloat16, "F32")], ids=str
)
def test_dtype_is_kept_or_widened(tmp_path, target, tensors, dtype, kept):
    state = {name: value.to(dtype) for name, value in tensors(full=False).items()}
    out = convert(write(tmp_path / "a.ckpt", state), target, "--variant", "c-ptp", "--lora-alpha", 16)
    assert inspect_head(out)["weights"]["dtypes"] == [kept]
    head = load_ptp(out)
    assert (head.config.variant, head.config.lora_alpha) == ("c-ptp", 16.0)
    assert torch.equal(head.embedding.outer.bias, state["model.u_embed.u_adapter.bias"].float())


def test_histogram_gives_window_and_accepted_drafts(tmp_path, target, tensors, capsys):
    """21 bins as the authors': 20 rows, of which the first is the target's own token."""
    counts, file = torch.arange(1, 22).double(), write(tmp_path / "a.ckpt", tensors(full=False))
    torch.save(counts / counts.sum(), tmp_path / "hist.pt")
    config = load_ptp(convert(file, target, "--histogram", tmp_path / "hist.pt")).config
    assert (config.window, config.num_speculative_tokens) == (20, 19)
    assert config.accepted == pytest.approx((counts[1:] / counts[1:].sum()).tolist())
    torch.save(torch.tensor([0.5, 0.25, 0.25]), tmp_path / "hist.pt")
    assert load_ptp(convert(file, target, "--histogram", tmp_path / "hist.pt", "--window", 3)).config.accepted is None
    assert "counts up to 2 tokens, window is 3" in capsys.readouterr().err


def test_accepted_drafts_of_independent_rows():
    """Each of 4 rows is correct with probability p: drafts after the first row are a chain of 3 with the same p."""
    p = 0.7
    counts = [*((1 - p) * p**g for g in range(4)), p**4]
    assert accepted_drafts(counts, 4) == pytest.approx([1 - p, p * (1 - p), p * p * (1 - p), p**3])
    assert accepted_drafts(counts, 3) == pytest.approx([1 - p, p * (1 - p), p * p])
    assert accepted_drafts(counts, 5) is None
    assert accepted_drafts([1.0, 0.0, 0.0], 2) is None


def without(state: dict, word: str) -> dict:
    return {name: value for name, value in state.items() if word not in name}


@pytest.mark.parametrize(
    "change, flags, words",
    [
        (lambda state: without(state, ".lora_"), [], ["has no adapters", "LoRA"]),
        (lambda state: without(state, "u_embed"), [], ["no u-embedding", "model.u_embed.*", "student.u_adapter.*"]),
        (lambda state: state | {"student.u_adapter.u_adapter.bias": torch.ones(8)}, [], ["has 2 u-embeddings"]),
        (lambda state: state | {"model.u_embed.more": torch.ones(8)}, [], ["more"]),
        (lambda state: state | {"model.u_embed.u_adapter.weight": torch.ones(4, 32)}, [], ["(4, 32)", "(8, 32)"]),
        (lambda state: without(state, "layers.1.mlp.up_proj.lora_B"), [], ["missing", "layers.1.mlp.up_proj.lora_B"]),
        (
            lambda state: (
                state | {"model.model.base_model.model.model.embed_tokens.lora_embedding_A.default": torch.ones(2)}
            ),
            [],
            ["lora_embedding_A", "linear layers"],
        ),
        (lambda state: state, ["--u-embedding", "scalar"], ["ieee", "not scalar", "--u-embedding ieee"]),
        (lambda state: state, ["--window", 1], ["window", "1", "2"]),
        (lambda state: state, ["--lora-alpha", 0], ["lora_alpha", "0"]),
        (lambda state: state, ["--histogram", "nowhere.pt"], ["nowhere.pt", "not a file"]),
        (lambda state: {**state, "model.u_embed.u_adapter.bias": torch.full((8,), float("nan"))}, [], ["NaN"]),
    ],
)
def test_unsupported_checkpoint_is_refused(tmp_path, target, tensors, capsys, change, flags, words):
    text = refusal(write(tmp_path / "a.ckpt", change(tensors(full=False))), target, capsys, *flags)
    assert all(word in text for word in words), text


class Planted:
    """Prints if it is unpickled."""

    def __reduce__(self):
        return (print, ("unpickled",))


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "a.ckpt"),
        (b"not a checkpoint", "a.ckpt"),
        (b"PK\x03\x04", "a.ckpt"),
        ([], "'state_dict'"),
        ({"weights": {}}, "'state_dict'"),
        ({"state_dict": 3}, "'state_dict'"),
        ({"state_dict": {}, "callbacks": Planted()}, "tensors alone"),
    ],
)
def test_other_file_is_refused_and_never_unpickled(tmp_path, target, capsys, content, words):
    if isinstance(content, bytes):
        (tmp_path / "a.ckpt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "a.ckpt")
    assert words in refusal(tmp_path / "a.ckpt", target, capsys)
    assert "unpickled\n" not in capsys.readouterr().out


@pytest.mark.parametrize("bad", [torch.ones(2, 3), torch.tensor([0.5, -0.5, 1.0]), torch.zeros(21), torch.ones(1), [1]])
def test_bad_histogram_is_refused(tmp_path, target, tensors, capsys, bad):
    torch.save(bad, tmp_path / "hist.pt")
    file = write(tmp_path / "a.ckpt", tensors(full=False))
    assert "not a histogram" in refusal(file, target, capsys, "--histogram", tmp_path / "hist.pt")


def test_other_target_and_other_models_folder_are_refused(tmp_path, tensors, target, capsys):
    file, before = write(tmp_path / "a.ckpt", tensors(full=False)), (target / "config.json").read_bytes()
    assert main(["convert", str(file), "--target", str(target), "--out", str(target)]) == 1
    assert "another model's config.json" in capsys.readouterr().err
    assert (target / "config.json").read_bytes() == before
    LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": 3}).save_pretrained(target)
    assert "layers.2." in refusal(file, target, capsys)
    (tmp_path / "empty").mkdir()
    assert "target" in refusal(file, tmp_path / "empty", capsys)
