"""Training data as the user names it: text files, folders, globs, .jsonl, .bin, `datasets` names."""

from __future__ import annotations

import glob
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_mtpc.data.bins import read_bin, split_at_eos
from vllm_mtpc.data.chat import encode_chat
from vllm_mtpc.data.documents import Documents
from vllm_mtpc.data.names import DATASET_SUFFIXES, FOLDER_SUFFIXES, is_path
from vllm_mtpc.errors import MtpcError, UsageError
from vllm_mtpc.progress import Bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = '{"text": ...}, {"messages": [...]} or {"prompt_ids": [...], "response_ids": [...]}'
PIECE_BYTES = 1 << 16  # the least that is taken of a text
BATCH = 64  # records tokenised at a time; fast tokenizers use all cores on them
Record = dict[str, Any]
Encoded = tuple[np.ndarray, np.ndarray]  # token ids int32, trained bool


def load_documents(
    data: list[str],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    split: str = "train",
    max_length: int | None = None,
    seed: int = 0,
    limit: int | None = None,
    most_bytes: int | None = None,
    vocab_size: int | None = None,
) -> Documents:
    """Documents of all `data`, tokenised, in the order given.

    data: each a text file (one document), a folder (its *.txt, *.md, *.py and *.jsonl files in sorted order), a glob, a
    .jsonl file, a .bin file, or NAME or NAME:CONFIG of the `datasets` library. split: of a datasets name.
    tokenizer: the target's; None is enough for prompt_ids and .bin files. max_length: documents are cut to their first
    so many tokens. limit: at most so many documents of jsonl, text and datasets records, chosen by the seed.
    most_bytes: of more than that, about so much is read, spread over all of it (`Share`).
    vocab_size: the target's; ids must be below it (default: the tokenizer's).

    Raises UsageError, naming file and line, for what cannot be read, and if nothing can be trained on.
    """
    encoder = _Encoder(tokenizer, max_length, vocab_size or (len(tokenizer) if tokenizer is not None else None))
    records = read_records(data, split, most_bytes)
    if limit is not None:
        records = _sample(records, limit, seed)
    documents = Documents.join(_progress(encoder.encode_all(records)))
    if not documents.trained.any():
        raise UsageError(f"data {', '.join(data)}: no document with a token to train on; give text or assistant turns")
    return documents


@dataclass(frozen=True)
class _Source:
    """One record and where it is from."""

    origin: str  # FILE, FILE:LINE or NAME:ROW
    record: Record


def files_of(name: str) -> list[Path] | None:
    """The files that a name of data stands for, in order; None for one of the `datasets` library.

    Reads nothing. Raises UsageError where there is no file, or nothing in it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        if any(file.suffix in DATASET_SUFFIXES for file in files):
            return None
        found = [file for file in files if file.suffix in FOLDER_SUFFIXES and file.stat().st_size]
        if not found:
            suffixes = ", ".join(f"*{suffix}" for suffix in sorted(FOLDER_SUFFIXES))
            raise UsageError(f"data {path}: no {suffixes} file with content in it")
        return found
    if path.is_file():
        found = [path]
    elif glob.has_magic(name):
        found = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
        if not found:
            raise UsageError(f"data {name}: no file matches")
    elif is_path(name):
        raise UsageError(f"data {name}: no such file or folder; name one that exists")
    else:
        return None
    for file in found:
        if not file.stat().st_size:
            raise UsageError(f"{file}: the file is empty")
    return found


def size_of(data: Iterable[str]) -> int:
    """Bytes of the files of the data. Raises UsageError as `files_of`."""
    return sum(file.stat().st_size for name in data for file in files_of(name) or ())


class Share:
    """Part of the data, spread evenly over it: a record is taken while less than the part has been taken before it."""

    def __init__(self, size: int, most: int | None) -> None:
        self.part = 1.0 if most is None else min(1.0, most / max(1, size))
        self._passed = self._taken = 0.0

    def takes(self, size: int, length: int | None = None) -> bool:
        """Whether `length` bytes (None: all) of the next record, which has `size`, are taken; of the first one yes."""
        taken = self._taken <= self.part * self._passed
        self._passed += size
        self._taken += taken * (size if length is None else length)
        return taken

    def piece(self, size: int) -> slice | None:
        """What is taken of a text: all of a short one, or a piece from the middle; None: nothing."""
        length = min(size, max(PIECE_BYTES, math.ceil(self.part * size)))
        start = (size - length) // 2
        return slice(start, start + length) if self.takes(size, length) else None


def read_records(data: Iterable[str], split: str, most_bytes: int | None = None) -> Iterator[_Source]:
    """Every record of the data with where it is from, in order; raises UsageError for what cannot be read.

    most_bytes: as of `load_documents`.
    """
    names = [(name, files_of(name)) for name in data]
    share = Share(size_of(name for name, files in names if files), most_bytes)
    for name, files in names:
        if files is None:
            yield from _dataset(str(Path(name).expanduser()) if is_path(name) else name, split, most_bytes)
        for file in files or ():
            yield from _file(file, share)


def _file(path: Path, share: Share) -> Iterator[_Source]:
    size = path.stat().st_size
    if path.suffix == ".bin":
        yield _Source(str(path), {"bin": path, "part": share.part})
    elif path.suffix == ".jsonl":
        yield from _jsonl(path, share)
    elif piece := share.piece(size):
        with path.open("rb") as file:
            file.seek(piece.start)
            raw = file.read(piece.stop - piece.start)
        text = _decode(raw, str(path)) if len(raw) == size else raw.decode("utf-8", "ignore")  # cut within a letter
        if "\0" in text:
            raise UsageError(f"{path}: not a text file (it holds zero bytes); token files must be named .bin")
        yield _Source(str(path), {"text": text})


def _jsonl(path: Path, share: Share) -> Iterator[_Source]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip() or not share.takes(len(line)):
                continue
            origin = f"{path}:{number}"
            try:
                record = json.loads(_decode(line, origin))
            except json.JSONDecodeError as error:
                raise UsageError(f"{origin}: not JSON ({error.msg} at column {error.colno})") from None
            if not isinstance(record, dict):
                raise UsageError(f"{origin}: a line must be one of {FORMS}")
            yield _Source(origin, record)


def _decode(raw: bytes, origin: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{origin}: not UTF-8 (byte {error.start} is 0x{raw[error.start]:02x}); convert it") from None


def _dataset(name: str, split: str, most_bytes: int | None) -> Iterator[_Source]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    path, _, config = (name, "", "") if Path(name).exists() else name.partition(":")
    try:
        rows = load_dataset(path, config or None, split=split)
    except (DatasetsError, OSError, ValueError, ImportError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(
            f"data {name}: neither a file or folder nor a data set that can be loaded with split {split!r} ({reason})"
        ) from None
    columns = rows.column_names
    wanted = next(
        (set(f) for f in (("prompt_ids", "response_ids"), ("messages",), ("text",)) if {*f} <= {*columns}), None
    )
    if wanted is None:
        raise UsageError(f"data {name}: columns {', '.join(columns)}; a column text or messages is needed")
    rows = rows.select_columns(sorted(wanted))
    step = 1 if most_bytes is None else max(1, rows.data.nbytes // max(1, most_bytes))
    for number, row in enumerate(rows if step == 1 else rows.select(range(0, len(rows), step))):
        yield _Source(f"{name}:{number * step}", row)


def _sample(records: Iterator[_Source], limit: int, seed: int) -> Iterator[_Source]:
    """At most `limit` records, each as likely as any other, in their order; holds no more than these."""
    generator, kept = random.Random(seed), []
    for number, source in enumerate(records):
        if len(kept) < limit:
            kept.append((number, source))
        elif (place := generator.randrange(number + 1)) < limit:
            kept[place] = (number, source)
    return (source for _, source in sorted(kept, key=lambda pair: pair[0]))


def _progress(documents: Iterator[Encoded]) -> Iterator[Encoded]:
    """The same documents, with a bar of documents and tokens."""
    tokens = 0
    with Bar(desc="tokenising", unit=" documents", mininterval=1) as bar:
        for number, (ids, trained) in enumerate(documents):
            tokens += len(ids)
            if number % BATCH == 0:
                bar.set_postfix(tokens=f"{tokens:,}", refresh=False)
            bar.update()
            yield ids, trained
        bar.set_postfix(tokens=f"{tokens:,}")


class _Encoder:
    """Records to token ids and what is trained."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, max_length: int | None, vocab_size: int | None
    ) -> None:
        self.tokenizer, self.max_length, self.vocab_size = tokenizer, max_length, vocab_size

    def encode_all(self, sources: Iterator[_Source]) -> Iterator[Encoded]:
        while batch := list(islice(sources, BATCH)):
            yield from self._encode_batch(batch)

    def _encode_batch(self, batch: list[_Source]) -> Iterator[Encoded]:
        texts = self._encode_texts([source for source in batch if _is_text(source.record)])
        for source in batch:
            try:
                documents = [next(texts)] if _is_text(source.record) else self._encode_other(source.record)
            except MtpcError as error:
                raise UsageError(f"{source.origin}: {error}") from None
            for ids, trained in documents:
                ids = self._checked(ids, source.origin)
                yield ids[: self.max_length], np.asarray(trained, bool)[: self.max_length]

    def _encode_texts(self, sources: list[_Source]) -> Iterator[Encoded]:
        """Texts with the tokenizer's special tokens and the end of text, everything trained."""
        if not sources:
            return iter(())
        for source in sources:
            if not isinstance(source.record["text"], str):
                raise UsageError(f"{source.origin}: text must be a string")
        tokenizer = self._tokenizer(sources[0].origin)
        encoded = tokenizer([source.record["text"] for source in sources], verbose=False)["input_ids"]
        eos = tokenizer.eos_token_id
        ended = (ids if eos is None or (ids and ids[-1] == eos) else [*ids, eos] for ids in encoded)
        return ((np.asarray(ids), np.ones(len(ids), bool)) for ids in ended)

    def _encode_other(self, record: Record) -> list[tuple[Any, Any]]:
        if "bin" in record:
            eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
            tokens = read_bin(record["bin"])
            tokens = tokens[: math.ceil(record["part"] * len(tokens))]
            return [(part, np.ones(len(part), bool)) for part in split_at_eos(tokens, eos)]
        if "prompt_ids" in record and "response_ids" in record:
            prompt, response = (exact_ids(record, key) for key in ("prompt_ids", "response_ids"))
            return [(prompt + response, [False] * len(prompt) + [True] * len(response))]
        if "messages" in record:
            return encode_chat(record["messages"], self._tokenizer())
        raise UsageError(f"keys {', '.join(map(str, record)) or '(none)'}; a record must be one of {FORMS}")

    def _tokenizer(self, origin: str | None = None) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise UsageError(
                f"{origin + ': ' if origin else ''}the target has no tokenizer, which text and messages need; give "
                "prompt_ids and response_ids, or .bin files"
            )
        return self.tokenizer

    def _checked(self, ids: Any, origin: str) -> np.ndarray:
        array = np.asarray(ids)
        if self.vocab_size is not None and len(array) and (array.max() >= self.vocab_size or array.min() < 0):
            wrong = array[(array >= self.vocab_size) | (array < 0)][0]
            raise UsageError(
                f"{origin}: token id {wrong} is outside the target's vocabulary of {self.vocab_size}; the data was "
                "made with another tokenizer"
            )
        return array.astype(np.int32)


def _is_text(record: Record) -> bool:
    """Exact ids and messages win over a text beside them."""
    return "text" in record and "messages" not in record and not {"prompt_ids", "response_ids"} <= record.keys()


def exact_ids(record: Record, key: str) -> list[int]:
    """Token ids given as such; raises UsageError."""
    value = record[key]
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise UsageError(f"{key} must be a list of integers")
    return value
