"""Training data as the user names it: text files, folders, globs, .jsonl, .bin, `datasets` names."""

from __future__ import annotations

import glob
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from vllm_mtpc.errors import MtpcError
from vllm_mtpc.train.data.bins import read_bin, split_at_eos
from vllm_mtpc.train.data.chat import encode_chat
from vllm_mtpc.train.data.documents import DataError, Documents
from vllm_mtpc.train.data.names import DATASET_SUFFIXES, FOLDER_SUFFIXES, is_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = '{"text": ...}, {"messages": [...]} or {"prompt_ids": [...], "response_ids": [...]}'
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
    vocab_size: int | None = None,
) -> Documents:
    """Documents of all `data`, tokenised, in the order given.

    data: each a text file (one document), a folder (its *.txt, *.md, *.py and *.jsonl files in sorted order), a glob, a
    .jsonl file, a .bin file, or NAME or NAME:CONFIG of the `datasets` library. split: of a datasets name.
    tokenizer: the target's; None is enough for prompt_ids and .bin files. max_length: documents are cut to their first
    so many tokens. limit: at most so many documents of jsonl, text and datasets records, chosen by the seed.
    vocab_size: the target's; ids must be below it (default: the tokenizer's).

    Raises DataError, naming file and line, for what cannot be read, and if nothing can be trained on.
    """
    encoder = _Encoder(tokenizer, max_length, vocab_size or (len(tokenizer) if tokenizer is not None else None))
    records = read_records(data, split)
    if limit is not None:
        records = _sample(records, limit, seed)
    documents = Documents.join(_progress(encoder.encode_all(records)))
    if not documents.trained.any():
        raise DataError(f"data {', '.join(data)}: no document with a token to train on; give text or assistant turns")
    return documents


@dataclass(frozen=True)
class _Source:
    """One record and where it is from."""

    origin: str  # FILE, FILE:LINE or NAME:ROW
    record: Record


def read_records(data: Iterable[str], split: str) -> Iterator[_Source]:
    """Every record of the data with where it is from, in order; raises DataError for what cannot be read."""
    for name in data:
        path = Path(name).expanduser()
        if path.is_dir():
            yield from _folder(path, split)
        elif path.is_file():
            yield from _file(path)
        elif glob.has_magic(name):
            found = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
            if not found:
                raise DataError(f"data {name}: no file matches")
            for match in found:
                yield from _file(match)
        elif is_path(name):
            raise DataError(f"data {name}: no such file or folder; name one that exists")
        else:
            yield from _dataset(name, split)


def _folder(folder: Path, split: str) -> Iterator[_Source]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if any(path.suffix in DATASET_SUFFIXES for path in files):
        yield from _dataset(str(folder), split)
        return
    found = [path for path in files if path.suffix in FOLDER_SUFFIXES and path.stat().st_size]
    if not found:
        raise DataError(
            f"data {folder}: no {', '.join(f'*{s}' for s in sorted(FOLDER_SUFFIXES))} file with content in it"
        )
    for path in found:
        yield from _file(path)


def _file(path: Path) -> Iterator[_Source]:
    if not path.stat().st_size:
        raise DataError(f"{path}: the file is empty")
    if path.suffix == ".bin":
        yield _Source(str(path), {"bin": path})
    elif path.suffix == ".jsonl":
        yield from _jsonl(path)
    else:
        text = _decode(path.read_bytes(), str(path))
        if "\0" in text:
            raise DataError(f"{path}: not a text file (it holds zero bytes); token files must be named .bin")
        yield _Source(str(path), {"text": text})


def _jsonl(path: Path) -> Iterator[_Source]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            origin = f"{path}:{number}"
            try:
                record = json.loads(_decode(line, origin))
            except json.JSONDecodeError as error:
                raise DataError(f"{origin}: not JSON ({error.msg} at column {error.colno})") from None
            if not isinstance(record, dict):
                raise DataError(f"{origin}: a line must be one of {FORMS}")
            yield _Source(origin, record)


def _decode(raw: bytes, origin: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: not UTF-8 (byte {error.start} is 0x{raw[error.start]:02x}); convert it") from None


def _dataset(name: str, split: str) -> Iterator[_Source]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    path, _, config = (name, "", "") if Path(name).exists() else name.partition(":")
    try:
        rows = load_dataset(path, config or None, split=split)
    except (DatasetsError, OSError, ValueError, ImportError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(
            f"data {name}: neither a file or folder nor a data set that can be loaded with split {split!r} ({reason})"
        ) from None
    columns = rows.column_names
    wanted = next(
        (set(f) for f in (("prompt_ids", "response_ids"), ("messages",), ("text",)) if {*f} <= {*columns}), None
    )
    if wanted is None:
        raise DataError(f"data {name}: columns {', '.join(columns)}; a column text or messages is needed")
    for number, row in enumerate(rows.select_columns(sorted(wanted))):
        yield _Source(f"{name}:{number}", row)


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
    with tqdm(desc="tokenising", unit=" documents", mininterval=1) as bar:
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
                raise DataError(f"{source.origin}: {error}") from None
            for ids, trained in documents:
                ids = self._checked(ids, source.origin)
                yield ids[: self.max_length], np.asarray(trained, bool)[: self.max_length]

    def _encode_texts(self, sources: list[_Source]) -> Iterator[Encoded]:
        """Texts with the tokenizer's special tokens and the end of text, everything trained."""
        if not sources:
            return iter(())
        for source in sources:
            if not isinstance(source.record["text"], str):
                raise DataError(f"{source.origin}: text must be a string")
        tokenizer = self._tokenizer(sources[0].origin)
        encoded = tokenizer([source.record["text"] for source in sources], verbose=False)["input_ids"]
        eos = tokenizer.eos_token_id
        ended = (ids if eos is None or (ids and ids[-1] == eos) else [*ids, eos] for ids in encoded)
        return ((np.asarray(ids), np.ones(len(ids), bool)) for ids in ended)

    def _encode_other(self, record: Record) -> list[tuple[Any, Any]]:
        if "bin" in record:
            eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
            return [(part, np.ones(len(part), bool)) for part in split_at_eos(read_bin(record["bin"]), eos)]
        if "prompt_ids" in record and "response_ids" in record:
            prompt, response = (exact_ids(record, key) for key in ("prompt_ids", "response_ids"))
            return [(prompt + response, [False] * len(prompt) + [True] * len(response))]
        if "messages" in record:
            return encode_chat(record["messages"], self._tokenizer())
        raise DataError(f"keys {', '.join(map(str, record)) or '(none)'}; a record must be one of {FORMS}")

    def _tokenizer(self, origin: str | None = None) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise DataError(
                f"{origin + ': ' if origin else ''}the target has no tokenizer, which text and messages need; give "
                "prompt_ids and response_ids, or .bin files"
            )
        return self.tokenizer

    def _checked(self, ids: Any, origin: str) -> np.ndarray:
        array = np.asarray(ids)
        if self.vocab_size is not None and len(array) and (array.max() >= self.vocab_size or array.min() < 0):
            wrong = array[(array >= self.vocab_size) | (array < 0)][0]
            raise DataError(
                f"{origin}: token id {wrong} is outside the target's vocabulary of {self.vocab_size}; the data was "
                "made with another tokenizer"
            )
        return array.astype(np.int32)


def _is_text(record: Record) -> bool:
    """Exact ids and messages win over a text beside them."""
    return "text" in record and "messages" not in record and not {"prompt_ids", "response_ids"} <= record.keys()


def exact_ids(record: Record, key: str) -> list[int]:
    """Token ids given as such; raises DataError."""
    value = record[key]
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise DataError(f"{key} must be a list of integers")
    return value
