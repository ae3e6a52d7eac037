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
from vllm_mtpc.train.cache import Computed, HiddenCache, data_fingerprint, target_fingerprint, write_cache
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


@pytest.fixture(autouse=True)
def shards_of_eight_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as a forward pass has: a matrix product of another height may round otherwise."""
    monkeypatch.setattr(cache, "SHARD_BYTES", 8 * SEQ * 64 * 4)


@pytest.mark.parametrize(
    ("dtype", "layers"), [(None, ()), (torch.float16, ()), (torch.bfloat16, ()), (torch.float32, (1, 2))]
)
def test_cache_equals_computed_states_bit_for_bit(folder, target, rows, dtype, layers):
    computed = Computed(target, rows, dtype, layers=layers)
    width = 64 * (1 + len(layers))
    for given in (dtype, None):  # None: the folder's dtype
        written = write_cache(folder, target, rows, given, layers=layers)
        assert torch.equal(written.hidden(ALL), computed.hidden(ALL))
        assert computed.hidden(ALL).dtype == (dtype or torch.float32)
    some = torch.tensor([9, 0, 3, 4, 10, 3])
    assert torch.equal(written.hidden(some), written.hidden(ALL)[some])
    nothing = torch.tensor([], dtype=torch.long)
    assert written.hidden(nothing).shape == computed.hidden(nothing).shape == (0, SEQ, width)


def test_packed_states_equal_single_documents(target, rows):
    states = Computed(target, rows).hidden(torch.tensor([2]))[0]
    for number in (0, 1):
        place = rows.document[2] == number
        alone = target.hidden(rows.tokens[2, place][None])[0]
        torch.testing.assert_close(states[place], alone, rtol=0, atol=1e-5)  # rounding of other shapes
    assert not states[rows.document[2] < 0].any()


def test_layer_states_match_the_model(target, rows):
    unpacked = Rows(rows.tokens, torch.zeros_like(rows.document), rows.trained)
    given = target.model(input_ids=rows.tokens[:8].long(), output_hidden_states=True).hidden_states
    found = target.hidden_with([0, 1, 2], rows.tokens[:8]).split(target.hidden_size, -1)
    for layer in (0, 1):
        torch.testing.assert_close(found[layer], given[layer])
        entering = Computed(target, unpacked, layer=layer).hidden(ALL[:8])
        torch.testing.assert_close(entering, given[layer], rtol=0, atol=1e-4)
    torch.testing.assert_close(target.backbone.norm(found[2]), found[3])
    torch.testing.assert_close(found[3], given[-1])
    assert torch.equal(target.hidden_with([], rows.tokens[:8]), target.hidden(rows.tokens[:8]))


def test_reading_a_few_rows_reads_only_their_pages(tmp_path):
    """A shard of 256 MiB, two rows of which are taken: resident memory grows by far less than the shard."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc, which this system does not have")
    file, size = tmp_path / "shard-00000.safetensors", (256, 512, 512)
    save_file({"hidden": torch.ones(size)}, file, {"format": "pt"})
    rows = Rows(*(torch.empty(size[:2]) for _ in range(3)))
    shard = cache.Shard(file, rows, torch.float32, (), {"format": "pt"})
    before = resident()
    mapped = cache._read_shard(shard, size[2])
    states = HiddenCache(rows, [mapped], torch.device("cpu")).hidden(torch.tensor([250, 3]))
    assert states.shape == (2, 512, 512) and bool((states == 1).all())
    assert resident() - before < 64 << 20


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
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", "shard-00000.safetensors"]
    first = (folder / "shard-00000.safetensors").stat().st_mtime_ns
    assert torch.equal(write_cache(folder, target, rows).hidden(ALL), Computed(target, rows).hidden(ALL))
    assert (folder / "shard-00000.safetensors").stat().st_mtime_ns == first  # not computed again
    monkeypatch.setattr(Computed, "hidden", lambda *_: pytest.fail("computed again"))
    monkeypatch.setattr(cache, "SHARD_BYTES", 1)
    write_cache(folder, target, rows)  # with the folder's size of shards


def test_missing_space_is_refused_before_computing(folder, target, rows, monkeypatch):
    needed = ROWS * SEQ * 64 * 4
    usage = shutil.disk_usage(folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    monkeypatch.setattr(Computed, "hidden", lambda *_: pytest.fail("computed"))
    with pytest.raises(UsageError, match=r"need 0\.000 GB more, 0\.000 GB are free"):
        write_cache(folder, target, rows)
    assert not list(folder.iterdir())


def test_cache_of_other_states_is_refused(folder, target, rows, tmp_path, monkeypatch):
    write_cache(folder, target, rows)
    with pytest.raises(UsageError, match=r"holds other hidden states: data_fingerprint .{16} \(requested: .{16}\);"):
        write_cache(folder, target, rows._replace(tokens=rows.tokens ^ 1))
    with pytest.raises(UsageError, match=r"dtype float32 \(requested: float16\); name another folder"):
        write_cache(folder, target, rows, torch.float16)
    with monkeypatch.context() as patch:
        patch.setattr(type(target), "drafter", {"method": "mtp"})
        with pytest.raises(UsageError, match="states transformers "):
            write_cache(folder, target, rows)
    with pytest.raises(UsageError, match=r"layers \[\] \(requested: \[2\]\)"):
        write_cache(folder, target, rows, layers=[2])
    make_target(tmp_path / "other", vocab_size=32, seed=7)  # the same config, other weights
    other = load_target(tmp_path / "other", attention="torch")
    with pytest.raises(UsageError, match="holds other hidden states: target_fingerprint "):
        write_cache(folder, other, rows)


def test_fingerprints(target, rows, tmp_path):
    again = load_target(target.name, dtype=torch.bfloat16, attention="torch")
    assert target_fingerprint(again) == target_fingerprint(target)
    assert data_fingerprint(Rows(rows.tokens.long(), rows.document.long(), rows.trained)) == data_fingerprint(rows)
    trained = rows.trained.clone()
    trained[3, 3] = ~trained[3, 3]
    assert data_fingerprint(rows._replace(trained=trained)) != data_fingerprint(rows)


DAMAGES = {
    "truncated": lambda shard: os.truncate(shard, shard.stat().st_size - 1),
    "header": lambda shard: shard.write_bytes(b"\xff" * 100),
    "empty": lambda shard: shard.write_bytes(b""),
    "shape": lambda shard: save_file({"hidden": torch.zeros(3, SEQ, 63)}, shard),
    "foreign": lambda shard: save_file({"hidden": torch.zeros(3, SEQ, 64)}, shard, {"format": "pt", "data": "a"}),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_shard_is_refused(folder, target, rows, kind):
    write_cache(folder, target, rows)
    shard = folder / "shard-00001.safetensors"
    DAMAGES[kind](shard)
    with pytest.raises(UsageError, match=r"shard-00001.safetensors is not usable .*delete it and run") as refused:
        write_cache(folder, target, rows)
    assert "\n" not in str(refused.value)
    shard.unlink()
    assert torch.equal(write_cache(folder, target, rows).hidden(ALL), Computed(target, rows).hidden(ALL))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows_per_shard": 0}, "rows_per_shard"),
        ({"dtype": "float8"}, "dtype float8"),
        ({"format_version": 2}, "format_version"),
        ({"colour": 1}, "colour 1"),
        ("not json", r"index.json: cannot be read as JSON"),
        (None, r"shard-00000.safetensors is not usable"),  # of other data: the shards hold the fingerprints, too
    ],
)
def test_damaged_index_is_refused(folder, target, rows, change, message):
    write_cache(folder, target, rows)
    index = folder / "index.json"
    if change is None:
        index.unlink()
        rows = rows._replace(tokens=rows.tokens ^ 1)
    else:
        index.write_text(change if change == "not json" else json.dumps({**json.loads(index.read_text()), **change}))
    with pytest.raises(MtpcError, match=message):
        write_cache(folder, target, rows)


def test_states_beyond_the_dtype_are_refused(folder, target, rows, monkeypatch):
    real = Target.hidden
    monkeypatch.setattr(Target, "hidden", lambda *arguments: real(*arguments) * 1e6)  # beyond float16
    with pytest.raises(UsageError, match=r"rows 0 to 7 hold NaN or infinity as float16; .*give dtype bfloat16"):
        write_cache(folder, target, rows, torch.float16)
    assert bool(write_cache(folder.with_name("wider"), target, rows, torch.bfloat16).hidden(ALL).isfinite().all())


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
    assert made.shards[0].dtype == torch.bfloat16
    assert packed.tokens.shape[1] == 16 and int((packed.document >= 0).sum()) == 110
    whole = torch.arange(len(packed.tokens))
    assert torch.equal(made.hidden(whole), Computed(target, packed, torch.bfloat16).hidden(whole))
    assert f"{len(whole)} rows, 110 tokens" in capsys.readouterr().out
