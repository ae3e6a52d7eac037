"""Randomly damaged files: a head loads, or is refused in one line with exit code 1."""

from __future__ import annotations

import random
import struct

import pytest

import vllm_mtpc
from tests.support.files import mutate
from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.cli import main
from vllm_mtpc.errors import MtpcError

ROUNDS = 100


def survives(folder) -> bool:
    """Whether the head still loads; any error but an MtpcError of one line fails the test."""
    try:
        load_head(folder)
    except MtpcError as error:
        assert len(str(error).splitlines()) == 1
        assert main(["inspect", str(folder)]) == 1
        return False
    return True


def test_damaged_config_is_read_or_refused(folder):
    rng, file = random.Random(0), folder / "config.json"
    original, loaded = file.read_bytes(), 0
    assert survives(folder)
    for _ in range(ROUNDS):
        file.write_bytes(mutate(original, rng))
        loaded += survives(folder)
        vllm_mtpc.has_heads(folder)
    assert loaded < ROUNDS / 2  # the changes do damage


@pytest.mark.parametrize("consistent", [True, False], ids=["length-kept-right", "length-left"])
def test_damaged_header_is_read_or_refused(folder, consistent):
    rng, file = random.Random(1), folder / "model.safetensors"
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, tensors, loaded = data[8 : 8 + size], data[8 + size :], 0
    for _ in range(ROUNDS):
        changed = mutate(header, rng)
        length = struct.pack("<Q", len(changed) if consistent else size)
        file.write_bytes(length + changed + tensors)
        loaded += survives(folder)
    assert loaded < ROUNDS / 2


def test_damaged_header_length_is_refused(folder):
    rng, file = random.Random(2), folder / "model.safetensors"
    data = file.read_bytes()
    for _ in range(20):
        length = struct.pack("<Q", rng.randrange(2 ** rng.randint(1, 64)))
        if length != data[:8]:
            file.write_bytes(length + data[8:])
            assert not survives(folder)
