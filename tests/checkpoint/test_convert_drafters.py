"""`vllm-mtpc convert` of DFlash and DSpark drafters keeps the drafts and refuses other settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint import conftest
from tests.checkpoint.conftest import convert_refusal, converted_from
from tests.support import drafters
from tests.support.files import front_matter_of
from tests.support.models import make_target
from vllm_mtpc.checkpoint import check_tensors, load_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.backbone import BackboneHead
from vllm_mtpc.hf import bind, load_target
from vllm_mtpc.hf.model import Target

torch.set_num_threads(1)
VOCAB = 48
TEXT = [3, 9, 4, 7, 30, 1, 12, 5, 2, 40, 41, 8]
# float32 against float64 over two layers whose states are some 3; a wrong layer id, norm or mask moves them by 0.1
TOLERANCE = 2e-4
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters")
    make_target(folder / "target", VOCAB, seed=0, layers=4)
    return folder


@pytest.fixture(scope="module")
def target(place: Path) -> Target:
    return load_target(place / "target", torch.float32)


def convert(source: Path, place: Path, out: Path) -> tuple[HeadConfig, BackboneHead]:
    config, head = load_head(conftest.convert(source, place / "target", out=out))
    check_tensors(out, config)
    return config, head


def drafter(folder: Path, target: Target, layout: str = "speculators dflash", **changes: Any) -> Path:
    """A checkpoint of a layout, edited by the functions `config` and `tensors`."""
    edit, replace = changes.pop("config", None), changes.pop("tensors", None)
    made = drafters.make(folder, layout, target.model, **changes)
    if edit:
        values = json.loads((made / "config.json").read_text())
        edit(values)
        (made / "config.json").write_text(json.dumps(values))
    if replace:
        save_file(replace(load_file(made / "model.safetensors")), made / "model.safetensors")
    return made


@torch.inference_mode()
def params_at(head: BackboneHead, target: Target, ends: list[int]) -> tuple[Any, Tensor]:
    """Circuits of the windows after TEXT[:end], and their x_1."""
    bind(head, target)
    tokens = torch.tensor([TEXT])
    document, position = torch.zeros_like(tokens), torch.arange(len(TEXT))[None]
    aux = target.hidden_with(head.aux_layers, tokens)[..., : -target.hidden_size]
    first = tokens[0, ends]
    start = torch.tensor(ends) - 1
    states = head.read(head.context(aux, position, document), torch.zeros_like(start), start, first)
    return head(states), first


def drafted(head: BackboneHead, target: Target, ends: list[int]) -> list[list[int]]:
    params, first = params_at(head, target, ends)
    return head.circuit.greedy(params, first[:, None])[:, 1:].tolist()


ENDS = list(range(1, len(TEXT)))


@pytest.mark.parametrize("layout", drafters.LAYOUTS)
def test_drafts_and_distributions_equal_the_drafters(tmp_path, place, target, layout, capsys) -> None:
    source = drafter(tmp_path / "drafter", target, layout)
    config, head = convert(source, place, tmp_path / "head")
    printed, anchor = capsys.readouterr().out, "dspark" in layout
    reference = drafters.Reference(source, target.model, anchor)
    drafts = drafters.BLOCK if anchor else drafters.BLOCK - 1
    assert (config.circuit, config.head, config.num_components) == ("ff", "backbone", 1)
    assert (config.window, config.num_speculative_tokens) == (drafts + 1, drafts)
    assert (config.aux_hidden_state_layer_ids, config.sample_from_anchor) == (list(drafters.AUX), anchor)
    assert (config.token_rank or 0) == (drafters.RANK if anchor else 0)

    wanted = [reference.greedy(TEXT[:end], TEXT[end], drafts) for end in ENDS]
    assert len({token for one in wanted for token in one}) > 5
    assert drafted(head, target, ENDS) == wanted

    params, _ = params_at(head, target, ENDS)
    for row, (end, tokens) in enumerate(zip(ENDS, wanted, strict=True)):
        states, previous = reference.block(TEXT[:end], TEXT[end], drafts), [TEXT[end], *tokens]
        for draft in range(drafts):
            given = params.leaf[row, draft + 1, 0]
            if params.bigram is not None:
                given = given + params.bigram.bias(draft, torch.tensor([previous[draft]]))[0]
            expected = reference.logits(states, previous[draft], draft).log_softmax(-1)
            torch.testing.assert_close(given.log_softmax(-1).double(), expected, rtol=0, atol=TOLERANCE)

    record = converted_from(tmp_path / "head")
    confidence = ["confidence_head.proj.bias", "confidence_head.proj.weight"] if anchor else []
    own = [] if layout == "original dflash" else ["embed_tokens.weight (the target's)", "lm_head.weight (the target's)"]
    assert record["left_out"] == confidence + own
    assert all(name in printed for name in record["left_out"])
    assert f"row {drafters.MASK} of {'its own' if own else 'the target'}" in record["mask"]
    assert record["trained_on"] == ("../target" if layout.startswith("speculators") else None)
    assert front_matter_of(tmp_path / "head")["library_name"] == "vllm"


def change(section: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    """Set keys of a section of the config; None: absent."""
    return lambda config: (config[section] if section else config).update(values)


top, layer, dflash = (partial(change, section) for section in ("", "transformer_layer_config", "dflash_config"))


def put(name: str, value: Tensor | Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: value if isinstance(value, Tensor) else value(tensors[name]).clone()}


def move_rows(first: int, last: int) -> Callable[[Tensor], Tensor]:
    return lambda rows: torch.cat([rows[:first], rows[first:last] + 1, rows[last:]])


def without(*starts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: value for name, value in tensors.items() if not name.startswith(starts)}


NO_MARKOV = {"markov_rank": 0, "tensors": without("markov", "confidence"), "config": top(markov_head_type=None)}
TWO_DRAFTS = {"config": change("speculators_config", proposal_methods=[{"speculative_tokens": 2}])}


@pytest.mark.parametrize(
    "layout, changes, anchor, proposed",
    [
        ("speculators dspark", {"sample_from_anchor": False}, False, None),
        ("speculators dspark", {"config": top(sample_from_anchor=None)}, False, None),  # the default of vLLM
        ("speculators dflash", {"sample_from_anchor": True}, True, None),
        ("speculators dflash", TWO_DRAFTS, False, 2),
        ("original dflash", {"config": dflash(sample_from_anchor=True)}, True, None),
        ("original dspark", NO_MARKOV, True, None),  # DeepSpec's DFlash
    ],
)
def test_settings_decide_the_block(tmp_path, place, target, layout, changes, anchor, proposed) -> None:
    source = drafter(tmp_path / "drafter", target, layout, **changes)
    config, head = convert(source, place, tmp_path / "head")
    drafts = drafters.BLOCK - (not anchor)
    found = config.sample_from_anchor, config.window, config.num_speculative_tokens
    assert found == (anchor, drafts + 1, proposed or drafts)
    assert (config.token_rank is None) == (changes is NO_MARKOV or "dflash" in layout)
    reference = drafters.Reference(source, target.model, anchor)
    assert drafted(head, target, ENDS) == [reference.greedy(TEXT[:end], TEXT[end], drafts) for end in ENDS]


def test_other_settings_give_other_drafts(tmp_path, place, target) -> None:
    """The control: layer ids of one layout read as the other's, or another mask."""
    source = drafter(tmp_path / "drafter", target, "original dflash")
    reference = drafters.Reference(source, target.model, False)
    wanted = [reference.greedy(TEXT[:end], TEXT[end], 3) for end in ENDS]
    for name, change in (("ids", {"target_layer_ids": [-1, 0, 1]}), ("mask", {"mask_token_id": 8})):
        other = drafter(tmp_path / name, target, "original dflash", config=dflash(**change))
        assert drafted(convert(other, place, tmp_path / f"{name}-head")[1], target, ENDS) != wanted


@pytest.mark.parametrize("is_named", [False, True])
def test_mask_of_its_own_file(tmp_path, place, target, is_named, capsys) -> None:
    source = drafter(tmp_path / "drafter", target, "original dflash")
    mask = torch.randn(target.hidden_size)
    torch.save({"embedding": mask, "mask_token_id": drafters.MASK} if is_named else mask, source / "mask_embedding.pt")
    _, head = convert(source, place, tmp_path / "head")
    assert torch.equal(head.backbone.mask_embedding, mask)
    torch.save({"embedding": mask, "mask_token_id": 3}, source / "mask_embedding.pt")
    assert "mask_embedding.pt: expected: the embedding of mask_token_id=7" in convert_refusal(
        source, place / "target", capsys
    )


def test_mask_after_the_vocabulary_is_the_drafters_own(tmp_path, place, target) -> None:
    """A drafter may have more rows than the target, one of them for the mask."""
    row, markov = torch.randn(1, target.hidden_size), "markov_head.markov_w1.weight"

    def longer(tensors: Tensors) -> Tensors:
        longer = {"embed_tokens.weight": row, markov: torch.ones(1, drafters.RANK)}
        return tensors | {name: torch.cat([tensors[name], value]) for name, value in longer.items()}

    values = {"mask_token_id": VOCAB, "config": top(vocab_size=VOCAB + 1)}
    source = drafter(tmp_path / "drafter", target, "original dspark", tensors=longer, **values)
    _, head = convert(source, place, tmp_path / "head")
    assert torch.equal(head.backbone.mask_embedding, row[0])
    assert head.token_source.shape == (VOCAB, drafters.RANK)


def test_sharded_files_in_bfloat16(tmp_path, place, target) -> None:
    """The target is float32: rows are compared in the narrower dtype."""
    source = drafter(tmp_path / "drafter", target, "speculators dspark")
    tensors = {name: value.bfloat16() for name, value in load_file(source / "model.safetensors").items()}
    (source / "model.safetensors").unlink()
    names, parts = sorted(tensors), {}
    for number in range(2):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names[number::2]}, source / file)
        parts |= dict.fromkeys(names[number::2], file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    _, head = convert(source, place, tmp_path / "head")
    assert {value.dtype for value in load_file(tmp_path / "head" / "model.safetensors").values()} == {torch.bfloat16}
    assert torch.equal(head.backbone.fc.weight, tensors["fc.weight"].float())


# ---- refusals ------------------------------------------------------------------------------


DFLASH, DSPARK, AUTHORS = "speculators dflash", "speculators dspark", "original dflash"
MOVED = move_rows(0, 3)
REFUSED_CONFIGS = [
    (DFLASH, top(speculators_model_type="dflash2"), "'speculators_model_type' = 'dflash2'"),
    (DFLASH, top(aux_hidden_state_layer_ids=[1, 2, 4]), "[1, 2, 4]; allowed: numbers from 0 to 3"),
    (AUTHORS, dflash(target_layer_ids=[0, 1, 3]), "[1, 2, 4]; allowed: numbers from 0 to 3"),
    (DFLASH, top(aux_hidden_state_layer_ids=None), "layers read = []"),
    (DFLASH, top(aux_hidden_state_layer_ids=[3, 2, 1]), "rising numbers"),
    (DFLASH, top(mask_token_id=None), "'mask_token_id' is missing"),
    (AUTHORS, dflash(mask_token_id=VOCAB), f"mask_token_id={VOCAB}"),
    (DFLASH, top(block_size=1), "window"),
    (DSPARK, top(markov_head_type="gated"), "'markov_head_type' = 'gated': Input should be 'vanilla'"),
    ("original dspark", top(attention_bias=True), "'attention_bias' = True"),
    (DFLASH, layer(num_hidden_layers=5), "missing: backbone.layers.2"),
    (DFLASH, layer(rope_parameters={"rope_theta": 1e4, "rope_type": "yarn"}), "rope_type' = 'yarn'"),
    (DFLASH, layer(rope_parameters={"full_attention": {}}), "'rope_parameters.rope_theta' is missing"),
    (AUTHORS, top(rope_parameters=None, rope_theta=5e3, rope_scaling={"type": "linear"}), ".type' = 'linear'"),
    (DFLASH, layer(layer_types=["sliding_attention", "full_attention"]), "layer_types.0' = 'sliding_attention'"),
    (AUTHORS, top(is_causal=True), "'is_causal' = True"),
    (AUTHORS, dflash(causal=True), "'causal' = True"),
    (AUTHORS, dflash(use_swa=True), "dflash_config.use_swa = True"),
    (AUTHORS, top(logit_scale=0.5), "'logit_scale' = 0.5"),
    (AUTHORS, top(num_target_layers=36), "num_target_layers = 36; allowed: 4"),
    (DFLASH, top(draft_vocab_size=20), "draft_vocab_size = 20; allowed: 48"),
    (AUTHORS, top(quantization_config={"quant_method": "fp8"}), "'quantization_config' ="),
    (AUTHORS, top(architectures=["Qwen3ForCausalLM"]), "architectures = ['Qwen3ForCausalLM']"),
]
REFUSED_TENSORS = [
    (DFLASH, put("lm_head.weight", MOVED), "is not the target's: 3 of 48 rows differ, row 0"),
    (DSPARK, put("embed_tokens.weight", MOVED), "embed_tokens.weight is not the target's"),
    (DFLASH, put("d2t", torch.ones(48)), "unknown tensor(s): backbone.d2t"),
    (DFLASH, put("lm_head.weight", lambda t: t[:20]), "lm_head.weight is (20, 64)"),
    (AUTHORS, without("norm."), "missing: backbone.norm.weight"),
    (AUTHORS, put("fc.weight", lambda t: t[:, :128]), "'backbone.fc.weight' has shape (64, 128)"),
]


@pytest.mark.parametrize(
    "key, layout, change, words",
    [*(("config", *case) for case in REFUSED_CONFIGS), *(("tensors", *case) for case in REFUSED_TENSORS)],
)
def test_other_drafter_is_refused(tmp_path, place, target, key, layout, change, words, capsys) -> None:
    source = drafter(tmp_path / "drafter", target, layout, **{key: change})
    assert words in convert_refusal(source, place / "target", capsys)


def test_mask_row_may_differ_from_the_targets(tmp_path, place, target) -> None:
    other = put("embed_tokens.weight", move_rows(drafters.MASK, drafters.MASK + 1))
    _, head = convert(drafter(tmp_path / "drafter", target, tensors=other), place, tmp_path / "head")
    assert torch.equal(head.backbone.mask_embedding, target.model.model.embed_tokens.weight[drafters.MASK] + 1)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "final_logit_softcapping = 30.0"),
        ({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, "of type gemma, scales its embeddings"),
    ],
)
def test_target_that_scales_embeddings_or_logits_is_refused(tmp_path, place, target, changes, words, capsys) -> None:
    source = drafter(tmp_path / "drafter", target)
    config = json.loads((place / "target" / "config.json").read_text()) | changes
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    assert words in convert_refusal(source, tmp_path / "target", capsys)
