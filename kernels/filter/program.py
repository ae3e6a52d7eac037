"""The steps of a circuit's filter between two tokens, as instructions of one small machine.

The machine holds the log weights of the current latent [r], a stack of vectors [r], and a message [r], which is the
evidence of the token just seen. Inner sums are numbered as in the checkpoint; A_f has rows log p(z' | z).

    CONDITION     weights <- normalise(weights + message)             on the token just seen
    TRANSITION f  weights <- log(exp(weights) A_f)                    to the latent below, given the one above
    PUSH          push weights                                        a region is opened
    UPWARD f      message <- log(A_f exp(pop + message))              a region is closed
    SIBLING       weights <- normalise(pop + message), push message   from a left child to its right sibling

A program is n + 1 lists of instructions: [0] from the root's weights to those of token 0, [k + 1] from token k to token
k + 1; the last list is empty. Every list begins with the evidence of its token as message.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class Op(IntEnum):
    """The operations above."""

    CONDITION = 0
    TRANSITION = 1
    PUSH = 2
    UPWARD = 3
    SIBLING = 4


class Instruction(NamedTuple):
    """An operation and its inner sum."""

    op: Op
    index: int = -1  # type: ignore[assignment]  # of the inner sum; TRANSITION and UPWARD only


Program = Sequence[Sequence[Instruction]]
CHANGE = {Op.PUSH: 1, Op.UPWARD: -1}  # of the number of vectors on the stack


def check_program(program: Program, n: int, num_inner: int) -> None:
    """Raise ValueError unless the machine can run `program` over n tokens with `num_inner` inner sums."""
    if len(program or ()) != n + 1 or program[n]:
        raise ValueError(f"program must be {n + 1} lists of instructions, the last one empty")
    depth = 0
    for k, instructions in enumerate(program):
        for op, index in instructions:
            if op in (Op.TRANSITION, Op.UPWARD) and not 0 <= index < num_inner:
                raise ValueError(f"program[{k}]: {Op(op).name} {index}, of {num_inner} inner sums counted from 0")
            if op in (Op.UPWARD, Op.SIBLING) and depth == 0:
                raise ValueError(f"program[{k}]: {Op(op).name} pops from an empty stack; PUSH comes first")
            depth += CHANGE.get(op, 0)
