"""The demo corpus: the source text of the Python standard library, as bytes in tensors.

Documents are files in sorted order, each preceded by the end-of-text token (id 256); every 20th file is held out for
validation.
"""

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from itertools import chain, pairwise
from pathlib import Path

import torch

from vllm_mtpc import demo
from vllm_mtpc.demo import HOLDOUT, MIN_BYTES

EOS = 256
VOCAB_SIZE = 257
ALSO_HELP = "and on the files that match; a pattern given twice counts twice"


@dataclass(frozen=True)
class Split:
    """Documents of one part of the corpus in one flat token array."""

    tokens: torch.Tensor  # [N] uint8-valued ids and EOS, int16
    starts: torch.Tensor  # [docs] index of each document's leading EOS
    lines: torch.Tensor  # [lines] index of the first byte of every line


@dataclass(frozen=True)
class Corpus:
    """Both parts, and what identifies them."""

    train: Split
    valid: Split
    sha256: str
    files: int
    bytes: int


def split(documents: list[bytes]) -> Split:
    """Joins documents, each led by EOS."""
    parts, starts, position = [], [], 0
    for document in documents:
        starts.append(position)
        parts += [torch.tensor([EOS], dtype=torch.int16), torch.frombuffer(bytearray(document), dtype=torch.uint8)]
        position += 1 + len(document)
    tokens = torch.cat([part.to(torch.int16) for part in parts])
    after_newline = (tokens[:-1] == ord("\n")) & (tokens[1:] != EOS)
    return Split(tokens, torch.tensor(starts), after_newline.nonzero()[:, 0] + 1)


def load(also: Sequence[str] = ()) -> Corpus:
    """The corpus: files of the standard library and of patterns.

    Every 20th file of each is held out, so a pattern given twice repeats text that is trained on alone.
    """
    sources = [demo.texts([Path(sysconfig.get_path("stdlib"))]), *map(matching, also)]
    rest = [text for texts in sources for index, text in enumerate(texts) if index % HOLDOUT != HOLDOUT - 1]
    return corpus_of(rest, [text for texts in sources for text in demo.held_out(texts)], list(chain(*sources)))


def matching(pattern: str) -> list[bytes]:
    """Texts of the files that match, sorted by path; raises ValueError for too few."""
    texts = [Path(name).read_bytes() for name in sorted(glob(pattern, recursive=True))]
    texts = [text for text in texts if len(text) >= MIN_BYTES]
    if len(texts) < HOLDOUT:
        raise ValueError(f"{pattern} matches {len(texts)} files of {MIN_BYTES} bytes or more, {HOLDOUT} are needed")
    return texts


def load_file(file: Path) -> Corpus:
    """One text file as two documents: its last 1/20 is held out."""
    text = file.read_bytes()
    end = len(text) - len(text) // HOLDOUT
    if end < MIN_BYTES:
        raise ValueError(
            f"{file} has {len(text)} bytes, at least {HOLDOUT * MIN_BYTES} are required: name a longer text"
        )
    return corpus_of([text[:end]], [text[end:]], [text])


def corpus_of(train: list[bytes], valid: list[bytes], texts: list[bytes]) -> Corpus:
    """Both parts; ``texts`` are what identifies them, in order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    return Corpus(split(train), split(valid), digest.hexdigest(), len(texts), sum(map(len, texts)))


def documents(part: Split) -> list[bytes]:
    """The documents of a part, without their leading EOS."""
    starts = [*part.starts.tolist(), len(part.tokens)]
    return [bytes(part.tokens[start + 1 : end].tolist()) for start, end in pairwise(starts)]


def write_jsonl(text: Corpus, folder: Path) -> None:
    """``train.jsonl`` and ``valid.jsonl``, a line {"text": ...} per document, without files that are not UTF-8."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", text.train), ("valid", text.valid)):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for document in documents(part):
                try:
                    file.write(json.dumps({"text": document.decode("utf-8")}) + "\n")
                except UnicodeDecodeError:
                    continue


def crops(part: Split, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Random windows of the text. Returns [count, length] int64.

    A prompt that is served starts anywhere a person starts typing, so 45 % of the windows start at a line, 10 % at a
    document (half of those with its leading EOS) and the rest at any byte.
    """
    last = len(part.tokens) - length
    kind = torch.rand(count, generator=generator)
    anywhere = torch.randint(0, last + 1, (count,), generator=generator)
    lines = part.lines if len(part.lines) else part.starts  # a text of one line
    line = lines[torch.randint(0, len(lines), (count,), generator=generator)]
    document = part.starts[torch.randint(0, len(part.starts), (count,), generator=generator)]
    document = document + torch.randint(0, 2, (count,), generator=generator)
    start = torch.where(kind < 0.10, document, torch.where(kind < 0.55, line, anywhere)).clamp(max=last)
    return part.tokens[start[:, None] + torch.arange(length)].long()


def main() -> None:
    """``python -m benchmarks.demo.corpus --out FOLDER``: the corpus as data of ``vllm-mtpc train``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo.corpus", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--text", type=Path, metavar="FILE", help="this text in place of the standard library")
    parser.add_argument("--also", nargs="*", default=[], metavar="PATTERN", help=ALSO_HELP)
    arguments = parser.parse_args()
    text = load_file(arguments.text) if arguments.text else load(arguments.also)
    write_jsonl(text, arguments.out)
    print(f"corpus: {text.files} files, {text.bytes} bytes, sha256 {text.sha256}: {arguments.out}")


if __name__ == "__main__":
    main()
