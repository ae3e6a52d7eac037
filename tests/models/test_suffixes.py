"""The longest known suffix against trying all lengths, and invalid tables."""

from __future__ import annotations

import pytest
import torch

from tests.support.byte_llama_reference import LONGEST, SPECIAL, VOCAB, Reference, make_table, make_texts
from vllm_mtpc.config.byte_targets import ByteLlamaConfig, check_byte_llama, known_ids
from vllm_mtpc.errors import CheckpointError, ServeConfigError
from vllm_mtpc.kernels.suffixes import ABSENT, SuffixTable, read_table

TEXTS = make_texts() + torch.randint(VOCAB, (20, 60), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def by_trying() -> Reference:
    reference = object.__new__(Reference)
    reference.table, reference.special, reference.context = make_table(TEXTS), list(SPECIAL), LONGEST
    return reference


def test_longest_suffix_is_found(by_trying: Reference) -> None:
    table = SuffixTable(*read_table([by_trying.table, by_trying.special]), LONGEST)
    lengths = set()
    for text in TEXTS:
        rows = [[text[t - j] if j <= t else ABSENT for j in range(LONGEST)] for t in range(len(text))]
        found = table(torch.tensor(rows)).tolist()
        assert found == [by_trying.subword(text, t) for t in range(len(text))]
        keys = {value - 1: key.count(",") + 1 for key, value in by_trying.table.items()}
        lengths |= {keys[subword] for subword in found}
    assert lengths >= set(range(1, LONGEST + 1))  # the texts reach every length


def test_special_id_stops_suffixes_one_token_before() -> None:
    """The off-by-one of training: a special id of 256 in the file stops suffixes after byte 255, not after 256."""
    table = {"256": 7, "256,98": 8, "257": 9, "257,98": 10}
    lookup = SuffixTable(*read_table([table, [256]]), 2)
    assert lookup(torch.tensor([[255, 97], [256, 97], [97, 255]])).tolist() == [6, 9, 0]


def test_invalid_table_or_config_is_refused() -> None:
    with pytest.raises(CheckpointError, match="more than 2 tokens"):
        SuffixTable({(1, 2, 3): 4}, (), 2)
    for entry in (None, [{}], [{"a": 1}, []], [["1"], []]):
        with pytest.raises(CheckpointError, match="restore config"):
            read_table(entry)
    with pytest.raises(ServeConfigError, match="plain Llama"):
        check_byte_llama(ByteLlamaConfig(vocab_size=VOCAB))
    expanding = {"expand_input_ids": True, "expand_input_ids_maxlen": 16, "expand_input_ids_vocab_size": 9}
    check_byte_llama(ByteLlamaConfig(vocab_size=VOCAB, **expanding))
    with pytest.raises(ServeConfigError, match="add_qk_norm"):
        check_byte_llama(ByteLlamaConfig(vocab_size=VOCAB, add_qk_norm=True, **expanding))


def test_config_drops_the_table_and_stale_ids() -> None:
    config = ByteLlamaConfig(
        vocab_size=VOCAB, eos_token_id=[128001, 259], bos_token_id=128000, expand_input_ids_dict=[]
    )
    assert not hasattr(config, "expand_input_ids_dict")
    assert (config.eos_token_id, config.bos_token_id) == ([259], None)
    assert (known_ids(259, VOCAB), known_ids(265, VOCAB), known_ids([300], VOCAB), known_ids(0, VOCAB)) == (
        259, None, None, 0
    )  # fmt: skip
