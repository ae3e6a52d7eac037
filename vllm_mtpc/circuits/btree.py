"""Binary tree of latents: every region of two or more tokens has one, its row given by the region above.

The window is halved until single tokens are left. A token has no latent of its own: it reads the one
of the region it is a child of, so the two tokens of a pair share a latent (MtPC paper, section 3;
the left part of an odd region takes round-half-to-even of its length).

Filtering walks the tree depth first. Each open region keeps one tensor: while its left child is being
read, its weights; afterwards, the message of that left child, which its own upward message needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vllm_mtpc.circuits.base import Circuit, Latents
from vllm_mtpc.kernels.filter import Instruction, Op, Program


@dataclass
class Region:
    """Tokens [lo, hi); two children when there is more than one; `index` into the inner sums (root: -1)."""

    lo: int
    hi: int
    children: tuple[Region, ...] = ()  # none, or two
    index: int = -1

    @property
    def height(self) -> int:
        return max((1 + child.height for child in self.children), default=0)


def build_tree(lo: int, hi: int) -> Region:
    region = Region(lo, hi)
    if hi - lo > 1:
        middle = lo + round((hi - lo) / 2)
        region.children = build_tree(lo, middle), build_tree(middle, hi)
    return region


def inner_regions(root: Region) -> list[Region]:
    """Regions with a sum of their own below the root, leaves to root, left to right within a height."""
    found, todo = [], [*root.children]
    while todo:
        region = todo.pop()
        if region.children:
            found.append(region)
            todo += region.children
    return sorted(found, key=lambda region: (region.height, region.lo))


class BTree(Circuit):
    name = "btree"

    @cached_property
    def tree(self) -> Region:
        tree = build_tree(0, self.window)
        for index, region in enumerate(inner_regions(tree)):
            region.index = index
        return tree

    @cached_property
    def latents(self) -> Latents:
        regions = inner_regions(self.tree)
        parents, reads = [0] * len(regions), [0] * self.window
        for region in (self.tree, *regions):
            for child in region.children:
                if child.children:
                    parents[child.index] = region.index + 1
                else:
                    reads[child.lo] = region.index + 1
        return Latents(parents, reads)

    @cached_property
    def program(self) -> Program:
        program: list[list[Instruction]] = [[]]
        _walk(self.tree, program)
        program[-1] = []  # behind the last token nothing is read
        return program


def _walk(region: Region, program: list[list[Instruction]]) -> None:
    """Append the instructions of a region to the last list; the list after a token begins where it is read."""
    if not region.children:
        program.append([])
        return
    left, right = region.children
    if region.index >= 0:
        program[-1].append(Instruction(Op.TRANSITION, region.index))
    program[-1].append(Instruction(Op.PUSH))
    _walk(left, program)
    program[-1].append(Instruction(Op.SIBLING))
    _walk(right, program)
    if region.index >= 0:
        program[-1].append(Instruction(Op.UPWARD, region.index))
