"""EvaByte and Byte-Llama on transformers: the states of the closed forms, in packed rows, read in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import byte_llama_reference as byte_llama
from tests.support import evabyte_reference as evabyte
from vllm_mtpc.errors import UsageError
from vllm_mtpc.heads.adapters import DraftLayers
from vllm_mtpc.hf import Session, Target, load_target

CLOSE = {"rtol": 1e-4, "atol": 2e-4}  # float32, products in another order


@pytest.fixture(scope="module", params=["evabyte", "byte-llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Any, list[Tensor]]:
    """A target, its definition, and three texts of unlike lengths: across windows, with subwords of many lengths."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "evabyte":
        reference: Any = evabyte.Reference(evabyte.make_evabyte(folder))
        generator = torch.Generator().manual_seed(0)
        texts = [torch.randint(64, 320, (length,), generator=generator) for length in (101, 64, 37)]
    else:
        written = byte_llama.make_texts()
        byte_llama.make_byte_llama(folder, written)
        reference = byte_llama.Reference(folder)
        texts = [torch.tensor(text[:length]) for text, length in zip(written, (60, 41, 23), strict=False)]
    return load_target(folder, torch.float32), reference, texts


def test_states_and_logits_are_the_definitions(pair: Any) -> None:
    target, reference, texts = pair
    for text in texts:
        hidden = target.hidden(text[None])[0]
        assert torch.allclose(hidden, reference.hidden(text.tolist()), **CLOSE)
        assert torch.allclose(target.logits(hidden), reference.logits(text.tolist()), rtol=1e-3, atol=2e-3)
    assert target.vocab_size == reference.logits(texts[0].tolist()).shape[1]


def test_documents_of_a_packed_row_do_not_read_each_other(pair: Any) -> None:
    target, reference, texts = pair
    documents = torch.cat([torch.full((len(text),), index) for index, text in enumerate(texts)])[None]
    found = target.hidden(torch.cat(texts)[None], documents)[0].split([len(text) for text in texts])
    for text, hidden in zip(texts, found, strict=True):
        assert torch.allclose(hidden, reference.hidden(text.tolist()), **CLOSE)


def test_session_reads_in_pieces(pair: Any) -> None:
    """Padded at the left, one token and several at a time."""
    target, reference, texts = pair
    session, more = Session(target), torch.stack([text[-12:] for text in texts])
    session.start([text[:-12] for text in texts])
    pieces = [session.read(more[:, :1])]
    pieces += [session.read(more[:, 1:6]), session.read(more[:, 6:])]
    for text, hidden in zip(texts, torch.cat(pieces, 1), strict=True):
        assert torch.allclose(hidden, reference.hidden(text.tolist())[-12:], **CLOSE)


def test_draft_layers_split_it(pair: Any) -> None:
    target, _, texts = pair
    layers, tokens = DraftLayers(target, 1), texts[0][None]
    states = layers.verifier(layers.trunk(tokens))
    assert torch.equal(states, target.hidden(tokens)) and torch.allclose(layers.draft(layers.trunk(tokens)), states)


def test_faulty_definition_is_noticed(tmp_path: Path) -> None:
    """Hidden summaries or shortened subwords exceed the tolerance of the comparisons above."""
    faulty = evabyte.Reference(evabyte.make_evabyte(tmp_path / "evabyte"), hide_summaries=True)
    texts = {"evabyte": list(range(64, 164)), "llama": byte_llama.make_texts()[0]}
    byte_llama.make_byte_llama(tmp_path / "llama", byte_llama.make_texts())
    wrong = {"evabyte": faulty, "llama": byte_llama.Reference(tmp_path / "llama", context=2)}
    for name, text in texts.items():
        hidden = load_target(tmp_path / name, torch.float32).hidden(torch.tensor([text]))[0]
        assert not torch.allclose(hidden, wrong[name].hidden(text), rtol=0.1, atol=0.1), name


def test_a_variant_that_is_not_implemented_is_refused(tmp_path: Path) -> None:
    evabyte.make_evabyte(tmp_path, norm_add_unit_offset=False)
    with pytest.raises(UsageError, match="norm_add_unit_offset=False is not served; allowed: True") as caught:
        load_target(tmp_path)
    assert "\n" not in str(caught.value)
