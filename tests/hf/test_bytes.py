"""EvaByte and Byte-Llama on transformers: the states of the closed forms, in packed rows, read in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.byte_llama_reference import make_byte_target
from vllm_mtpc.heads.trunk.lora import LoraDraftLayers
from vllm_mtpc.hf import Session, Target, load_target

CLOSE = {"rtol": 1e-4, "atol": 2e-4}  # float32, products in another order


@pytest.fixture(scope="module", params=["evabyte", "byte_llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Any, list[Tensor]]:
    """A target, its definition, and three texts."""
    folder = tmp_path_factory.mktemp(request.param)
    made = make_byte_target(request.param, folder)
    return load_target(folder, torch.float32), made.reference, [torch.tensor(text) for text in made.texts]


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
    layers, tokens = LoraDraftLayers(target, 1), texts[0][None]
    states = layers.plain(layers.trunk(tokens))
    assert torch.equal(states, target.hidden(tokens)) and torch.allclose(layers.draft(layers.trunk(tokens)), states)
