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
from vllm_mtpc.errors import UsageError
from vllm_mtpc.hf import Target, load_target
from vllm_mtpc.train import cache, cache_command
from vllm_mtpc.train.cache import (
    Computed,
    HiddenCache,
    data_fingerprint,
    target_fingerprint,
    write_cache,
)
from vllm_mtpc.train.options import parse
from vllm_mtpc.train.run import read_data

SEQ, ROWS = 24, 11
ALL = torch.arange(ROWS)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    make_target(folder, vocab_size=32, seed=0)
    return load_target(folder, attention="torch")


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


def write(folder: Path, target: Target, rows: Rows, **arguments: object) -> HiddenCache:
    return write_cache(folder, target, rows, **{"rows_per_shard": 4, "batch_rows": 2, **arguments})


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_cache_equals_computed_states_bit_for_bit(folder, target, rows, dtype):
    # The same groups of rows in both: a matrix product of another height may round otherwise.
    computed = Computed(target, rows, batch_rows=2, dtype=dtype)
    written = write(folder, target, rows, dtype=dtype)
    assert written.dtype == computed.dtype == (dtype or torch.float32)
    assert (written.num_rows, written.seq_len, written.hidden_size) == (ROWS, SEQ, 64)
    assert (computed.num_rows, computed.seq_len, computed.hidden_size) == (ROWS, SEQ, 64)
    for source in (written, write(folder, target, rows, dtype=dtype)):
        assert torch.equal(source.hidden(ALL), computed.hidden(ALL))


def test_cache_reads_rows_in_any_order(folder, target, rows):
    written = write(folder, target, rows)
    some = torch.tensor([9, 0, 3, 4, 10, 3])
    assert torch.equal(written.hidden(some), written.hidden(ALL)[some])
    # Other groups of rows may round otherwise: float32 states of size 1, a few units in the last place.
    torch.testing.assert_close(written.hidden(some), Computed(target, rows).hidden(some), rtol=0, atol=1e-5)
    nothing = torch.tensor([], dtype=torch.long)
    assert written.hidden(nothing).shape == Computed(target, rows).hidden(nothing).shape == (0, SEQ, 64)


def test_packed_states_equal_single_documents(target, rows):
    states = Computed(target, rows).hidden(torch.tensor([2]))[0]
    for number in (0, 1):
        place = rows.document[2] == number
        alone = target.hidden(rows.tokens[2, place][None])[0]
        torch.testing.assert_close(states[place], alone, rtol=0, atol=1e-5)  # rounding of other shapes
    assert not states[rows.document[2] < 0].any()


def test_layer_input_gives_the_final_states(target, rows):
    """The input of the last layer, through this layer and the norm, gives the final states."""
    unpacked = Rows(rows.tokens, torch.zeros_like(rows.document), rows.trained)
    entering = Computed(target, unpacked, layer=1).hidden(ALL)
    backbone = target.backbone
    positions = torch.arange(SEQ)[None]
    with torch.no_grad():
        rotary = backbone.rotary_emb(entering, positions)
        mask = torch.full((SEQ, SEQ), -torch.inf).triu(1)[None, None]
        after = backbone.layers[1](entering, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
        final = backbone.norm(after[0] if isinstance(after, tuple) else after)
    torch.testing.assert_close(final, Computed(target, unpacked).hidden(ALL), rtol=0, atol=1e-4)
    with pytest.raises(UsageError, match="has layers 0 to 1"):
        Computed(target, rows, layer=2)


def test_reading_a_few_rows_reads_only_their_pages(tmp_path):
    """A shard of 256 MiB, two rows of which are taken: resident memory grows by far less than the shard."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc, which this system does not have")
    index = cache.Index(
        format_version=1,
        target="t",
        target_fingerprint="a",
        data_fingerprint="b",
        num_rows=256,
        seq_len=512,
        hidden_size=512,
        dtype="float32",
        layer=None,
        rows_per_shard=256,
    )
    metadata = {"data": "b", "target": "a"}
    save_file({"hidden": torch.ones(256, 512, 512)}, tmp_path / "shard-00000.safetensors", metadata)
    empty = Rows(*(torch.empty(0) for _ in range(3)))
    before = resident()
    shard = cache._shard(tmp_path, index, 0)
    states = HiddenCache(index, empty, [shard], torch.device("cpu")).hidden(torch.tensor([250, 3]))
    assert states.shape == (2, 512, 512) and bool((states == 1).all())
    assert resident() - before < 64 << 20


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int, error: Exception) -> None:
    """Saving fails after `after` shards."""
    real, count = cache.save_tensors, [0]

    def save(path: Path, *arguments: object) -> None:
        count[0] += path.name.startswith("shard")
        if count[0] > after:
            raise error
        real(path, *arguments)

    monkeypatch.setattr(cache, "save_tensors", save)


def test_interrupted_cache_continues(folder, tmp_path, target, rows, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted(patch, 1, KeyboardInterrupt())
        write(folder, target, rows)
    first = (folder / "shard-00000.safetensors").stat()
    continued = write(folder, target, rows)
    assert (folder / "shard-00000.safetensors").stat().st_mtime_ns == first.st_mtime_ns  # not computed again
    assert torch.equal(continued.hidden(ALL), write(tmp_path / "whole", target, rows).hidden(ALL))
    assert not list(folder.glob("*.partial"))


def test_finished_cache_is_not_computed_again(folder, target, rows, monkeypatch):
    write(folder, target, rows)
    monkeypatch.setattr(Computed, "hidden", lambda *_: pytest.fail("computed again"))
    write(folder, target, rows)
    write_cache(folder, target, rows)  # without a size of shards, that of the folder
    monkeypatch.undo()
    write(folder.with_name("half"), target, rows, dtype=torch.float16)
    monkeypatch.setattr(Computed, "hidden", lambda *_: pytest.fail("computed again"))
    assert write(folder.with_name("half"), target, rows).dtype == torch.float16  # that of the folder


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_keeps_finished_shards(folder, target, rows, monkeypatch, error):
    with monkeypatch.context() as patch:
        real = cache.save_file

        def save(tensors: object, path: Path, metadata: object) -> None:
            if path.name.startswith("shard-00001"):
                path.write_bytes(b"half of a shard")
                raise error
            real(tensors, path, metadata)

        patch.setattr(cache, "save_file", save)
        with pytest.raises(
            UsageError, match=r"the disk is full\); finished shards are intact: free space and run again"
        ):
            write(folder, target, rows)
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", "shard-00000.safetensors"]
    assert torch.equal(write(folder, target, rows).hidden(ALL), Computed(target, rows, batch_rows=2).hidden(ALL))


def test_missing_space_is_refused_before_computing(folder, target, rows, monkeypatch):
    needed = ROWS * SEQ * 64 * 4
    usage = shutil.disk_usage(folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    monkeypatch.setattr(Computed, "hidden", lambda *_: pytest.fail("computed"))
    with pytest.raises(UsageError, match=r"need 0\.000 GB more, 0\.000 GB are free"):
        write(folder, target, rows)
    assert not folder.exists()


def test_cache_of_other_states_is_refused(folder, target, rows, tmp_path):
    write(folder, target, rows)
    with pytest.raises(UsageError, match=r"holds other hidden states: data .{12}… "):
        write(folder, target, rows._replace(tokens=rows.tokens ^ 1))
    with pytest.raises(UsageError, match=r"dtype 'float32' \(requested: 'float16'\); name another folder"):
        write(folder, target, rows, dtype=torch.float16)
    make_target(tmp_path / "other", vocab_size=32, seed=7)  # the same config, other weights
    other = load_target(tmp_path / "other", attention="torch")
    with pytest.raises(UsageError, match="holds other hidden states: target "):
        write(folder, other, rows)


def test_fingerprints(target, rows, tmp_path):
    again = load_target(target.name, dtype=torch.bfloat16, attention="torch")
    assert target_fingerprint(again) == target_fingerprint(target)
    assert data_fingerprint(Rows(rows.tokens.long(), rows.document.long(), rows.trained)) == data_fingerprint(rows)
    trained = rows.trained.clone()
    trained[3, 3] = ~trained[3, 3]
    assert data_fingerprint(rows._replace(trained=trained)) != data_fingerprint(rows)


def damage(kind: str, shard: Path) -> None:
    if kind == "truncated":
        os.truncate(shard, shard.stat().st_size - 1)
    elif kind == "header":
        shard.write_bytes(b"\xff" * 100)
    elif kind == "empty":
        shard.write_bytes(b"")
    elif kind == "shape":
        save_file({"hidden": torch.zeros(4, SEQ, 63)}, shard)
    elif kind == "foreign":
        save_file({"hidden": torch.zeros(4, SEQ, 64)}, shard)


@pytest.mark.parametrize("kind", ["truncated", "header", "empty", "shape", "foreign"])
def test_damaged_shard_is_refused(folder, target, rows, kind):
    write(folder, target, rows)
    shard = folder / "shard-00001.safetensors"
    damage(kind, shard)
    with pytest.raises(UsageError, match=r"shard-00001.safetensors is not usable .*delete it and run") as refused:
        write(folder, target, rows)
    assert "\n" not in str(refused.value)
    shard.unlink()
    assert torch.equal(write(folder, target, rows).hidden(ALL), Computed(target, rows, batch_rows=2).hidden(ALL))


def test_damaged_index_is_refused(folder, target, rows):
    write(folder, target, rows)
    index = folder / "index.json"
    for change, message in (
        ({"rows_per_shard": 0}, "rows_per_shard"),
        ({"dtype": "float8"}, "'dtype' = 'float8'"),
        ({"format_version": 2}, "format_version"),
        ({"colour": 1}, "unknown key 'colour'"),
    ):
        values = json.loads(index.read_text())
        index.write_text(json.dumps({**values, **change}))
        with pytest.raises(UsageError, match=message):
            write(folder, target, rows)
        index.write_text(json.dumps(values))
    index.write_text("not json")
    with pytest.raises(UsageError, match=r"index.json: .*delete the folder"):
        write(folder, target, rows)
    index.unlink()
    with pytest.raises(UsageError, match=r"has no index.json but holds shard-00000"):
        write(folder, target, rows)


def test_states_beyond_the_dtype_are_refused(folder, target, rows, monkeypatch):
    real = Target.hidden
    monkeypatch.setattr(Target, "hidden", lambda *arguments: real(*arguments) * 1e6)  # beyond float16
    with pytest.raises(UsageError, match=r"rows 0 to 1 hold NaN or infinity as float16; .*give dtype bfloat16"):
        write(folder, target, rows, dtype=torch.float16)
    assert bool(write(folder.with_name("wider"), target, rows, dtype=torch.bfloat16).hidden(ALL).isfinite().all())


def test_invalid_rows_and_dtypes_are_refused(folder, target, rows):
    with pytest.raises(UsageError, match="allowed: one shape"):
        write(folder, target, rows._replace(trained=rows.trained[1:]))
    with pytest.raises(UsageError, match="allowed: float16, bfloat16, float32"):
        write(folder, target, rows, dtype=torch.int8)


def test_cache_command_writes_rows_of_training(tmp_path, target, capsys, monkeypatch):
    (tmp_path / "model").symlink_to(target.name)
    generator = torch.Generator().manual_seed(4)
    data = tmp_path / "d.jsonl"
    with data.open("w") as file:
        for length in (30, 5, 11, 64):
            ids = torch.randint(32, (length,), generator=generator).tolist()
            file.write(json.dumps({"prompt_ids": ids[:2], "response_ids": ids[2:]}) + "\n")
    parser = argparse.ArgumentParser()
    cache_command.add_arguments(parser)
    out = tmp_path / "cache"
    flags = f"--target {tmp_path / 'model'} --data {data} --validation-data {data} --out {out} --seq-len 16 --seed 3"
    flags += " --dtype bfloat16"
    assert cache_command.run(parser.parse_args([*flags.split(), "--device", "cpu", "--attention", "torch"])) == 0
    # A training run with these options packs these rows.
    shared = {"target": target.name, "data": [str(data)], "validation_data": [str(data)], "seq_len": 16, "seed": 3}
    packed, _, _ = read_data(parse({**shared, "out": tmp_path / "head", "window": 4, "cache": out}), target)
    with monkeypatch.context() as patch:
        patch.setattr(Computed, "hidden", lambda *_: pytest.fail("computed again"))
        made = write_cache(out, target, packed)
    assert made.dtype == torch.bfloat16 and made.seq_len == 16 and int((made.rows.document >= 0).sum()) == 110
    whole = torch.arange(made.num_rows)
    assert torch.equal(made.hidden(whole), Computed(target, packed, dtype=torch.bfloat16).hidden(whole))
    assert f"{made.num_rows} rows, 110 tokens" in capsys.readouterr().out
