"""Hidden states on disk are the computed ones; folders that are damaged, full or of another run are refused."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tests.support.models import make_target
from vllm_mtpc.data.rows import Rows
from vllm_mtpc.errors import MtpcError, UsageError
from vllm_mtpc.hf import Target, load_target
from vllm_mtpc.train import cache, cache_command
from vllm_mtpc.train.cache import Computed, write_cache
from vllm_mtpc.train.options import parse
from vllm_mtpc.train.run import read_data

SEQ, ROWS = 24, 11
ALL = torch.arange(ROWS)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    make_target(folder, vocab_size=32, seed=0)
    return load_target(folder)


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Two documents a row, then some padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, (ROWS, SEQ), generator=generator, dtype=torch.int32)
    document = (torch.arange(SEQ) >= 10).int().repeat(ROWS, 1)
    document[:, SEQ - 3 :] = -1
    tokens[document < 0] = 0
    return Rows(tokens, document, document >= 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def shards_of_eight_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as a forward pass has: a matrix product of another height may round otherwise."""
    monkeypatch.setattr(cache, "SHARD_BYTES", 8 * SEQ * 64 * 4)


@pytest.mark.parametrize(("dtype", "layers"), [("float32", ()), ("float16", ()), ("bfloat16", ()), ("float32", (1, 2))])
def test_cache_equals_computed_states_bit_for_bit(folder, target, rows, dtype, layers):
    target = load_target(target.name, getattr(torch, dtype))
    computed = Computed(target, rows, layers=layers)
    for _ in range(2):
        written = write_cache(folder, target, rows, layers=layers)
        assert torch.equal(written.hidden(ALL), computed.hidden(ALL)) and computed.hidden(ALL).dtype == target.dtype
    some = torch.tensor([9, 0, 3, 4, 10, 3])
    assert torch.equal(written.hidden(some), written.hidden(ALL)[some])
    nothing = torch.tensor([], dtype=torch.long)
    assert written.hidden(nothing).shape == computed.hidden(nothing).shape == (0, SEQ, 64 * (1 + len(layers)))


def test_states_of_layers_equal_the_model_and_padding_is_zero(target, rows):
    expected = target.model(input_ids=rows.tokens[:8].long(), output_hidden_states=True).hidden_states
    found = target.hidden_with([0, 1, 2], rows.tokens[:8]).split(target.hidden_size, -1)
    unpacked = Rows(rows.tokens, torch.zeros_like(rows.document), rows.trained)
    for layer in (0, 1):
        torch.testing.assert_close(found[layer], expected[layer])
        entering = Computed(target, unpacked, layer=layer).hidden(ALL[:8])
        torch.testing.assert_close(entering, expected[layer], rtol=0, atol=1e-4)  # rounding of other shapes
    torch.testing.assert_close(found[3], expected[-1])
    assert not Computed(target, rows).hidden(ALL)[rows.document < 0].any()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        KeyboardInterrupt(),
    ],
)
def test_interrupted_cache_continues(folder, target, rows, monkeypatch, error):
    is_full = isinstance(error, Exception)
    message = r"No space left on device.*intact: correct this \(.*\), and run again" if is_full else None
    real = cache.save_file

    def save(tensors: object, path: Path, metadata: object) -> None:
        if path.name.startswith("shard-00001"):
            path.write_bytes(b"half of a shard")
            raise error
        real(tensors, path, metadata)

    with monkeypatch.context() as patch, pytest.raises(UsageError if is_full else KeyboardInterrupt, match=message):
        patch.setattr(cache, "save_file", save)
        write_cache(folder, target, rows)
    assert sorted(path.name for path in folder.iterdir()) == ["shard-00000.safetensors"]
    first = (folder / "shard-00000.safetensors").stat().st_mtime_ns
    assert torch.equal(write_cache(folder, target, rows).hidden(ALL), Computed(target, rows).hidden(ALL))
    assert (folder / "shard-00000.safetensors").stat().st_mtime_ns == first  # not computed again
    monkeypatch.setattr(Computed, "hidden", lambda *_: pytest.fail("computed again"))
    write_cache(folder, target, rows)


def test_missing_space_is_refused_before_computing(folder, target, rows, monkeypatch):
    usage = shutil.disk_usage(folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=ROWS * SEQ * 64 * 4 - 1))
    monkeypatch.setattr(Computed, "hidden", lambda *_: pytest.fail("computed"))
    with pytest.raises(UsageError, match=r"need 0\.000 GB more, 0\.000 GB are free"):
        write_cache(folder, target, rows)
    assert not list(folder.iterdir())


def test_damaged_cache_is_refused(folder, target, rows):
    write_cache(folder, target, rows)
    shard = folder / "shard-00001.safetensors"
    save_file({"hidden": torch.zeros(3, SEQ, 64)}, shard, None)
    with pytest.raises(MtpcError, match="holds other hidden states: data_fingerprint None"):
        write_cache(folder, target, rows)
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(MtpcError, match=r"shard-00001.safetensors is not usable .*delete it and run") as refused:
        write_cache(folder, target, rows)
    assert "\n" not in str(refused.value)


def test_cache_of_other_states_is_refused(folder, target, rows, tmp_path, monkeypatch):
    write_cache(folder, target, rows)
    make_target(tmp_path / "other", vocab_size=32, seed=7)  # the same config, other weights
    other_target = load_target(tmp_path / "other")
    other_rows = rows._replace(tokens=rows.tokens ^ 1)
    for arguments, message in (
        ((target, other_rows), r"holds other hidden states: data_fingerprint .{16} \(requested: .{16}\);"),
        ((load_target(target.name, torch.bfloat16), rows), r"states: dtype float32 \(requested: bfloat16\)"),
        ((target, rows, [2]), r"layers \[\] \(requested: \[2\]\)"),
        ((other_target, rows), "holds other hidden states: target_fingerprint "),
    ):
        with pytest.raises(UsageError, match=message):
            write_cache(folder, *arguments)
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="states transformers "):
        patch.setattr(type(target), "drafter", {"method": "mtp"})
        write_cache(folder, target, rows)


def test_states_beyond_the_dtype_are_refused(folder, target, rows, monkeypatch):
    half, wider = (load_target(target.name, dtype) for dtype in (torch.float16, torch.bfloat16))
    real = Target.hidden
    monkeypatch.setattr(Target, "hidden", lambda *arguments: real(*arguments) * 1e6)  # beyond float16
    with pytest.raises(UsageError, match=r"rows 0 to 7 hold NaN or infinity; .*--target-dtype bfloat16"):
        write_cache(folder, half, rows)
    assert bool(write_cache(folder.with_name("wider"), wider, rows).hidden(ALL).isfinite().all())


def test_cache_command_writes_rows_of_training(tmp_path, target, capsys, monkeypatch):
    (tmp_path / "model").symlink_to(target.name)
    generator, data, out = torch.Generator().manual_seed(4), tmp_path / "d.jsonl", tmp_path / "cache"
    with data.open("w") as file:
        for length in (30, 5, 11, 64):
            ids = torch.randint(32, (length,), generator=generator).tolist()
            file.write(json.dumps({"prompt_ids": ids[:2], "response_ids": ids[2:]}) + "\n")
    parser = argparse.ArgumentParser()
    cache_command.add_arguments(parser)
    flags = f"--target {tmp_path / 'model'} --data {data} --validation-data {data} --out {out} --seq-len 16 --seed 3"
    flags += " --device cpu"
    assert cache_command.run(parser.parse_args(flags.split())) == 0
    # A training run with these options packs these rows.
    shared = {"target": target.name, "data": [str(data)], "validation_data": [str(data)], "seq_len": 16, "seed": 3}
    packed, _, _ = read_data(parse({**shared, "out": tmp_path / "head", "window": 4, "cache": out}), target)
    with monkeypatch.context() as patch:
        patch.setattr(Computed, "hidden", lambda *_: pytest.fail("computed again"))
        made = write_cache(out, target, packed)
    assert packed.tokens.shape[1] == 16 and int((packed.document >= 0).sum()) == 110
    whole = torch.arange(len(packed.tokens))
    assert torch.equal(made.hidden(whole), Computed(target, packed).hidden(whole))
    assert f"{len(whole)} rows, 110 tokens" in capsys.readouterr().out
