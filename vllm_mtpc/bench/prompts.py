"""Prompts of the demo: openings of functions in the library text that its models were not trained on."""

from __future__ import annotations

import re

_OPENING = re.compile(rb"^ *(?:def|class) ", re.MULTILINE)


def held_out(count: int, length: int = 200) -> list[str]:
    """``count`` snippets of ``length`` ASCII bytes, spread over the held-out documents, always the same ones.

    Each begins at a definition; the first definition of every document is passed over in favour of one in its middle.
    """
    from vllm_mtpc.demo import corpus

    snippets: list[list[str]] = []
    for document in corpus.documents(corpus.load().valid):
        cuts = [document[found.start() : found.start() + length] for found in _OPENING.finditer(document)]
        usable = [cut.decode("ascii") for cut in cuts if len(cut) == length and cut.isascii()]
        middle = len(usable) // 2
        snippets.append(usable[middle:] + usable[:middle])
    longest = max((len(found) for found in snippets), default=0)
    spread = [found[turn] for turn in range(longest) for found in snippets if turn < len(found)]
    if len(spread) < count:
        raise ValueError(f"{count} prompts asked for, the held-out text has {len(spread)} openings of {length} bytes")
    return spread[:count]
