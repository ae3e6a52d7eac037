"""Binary tree of latents: every region of two or more tokens has one, its row given by the region above.

The window is halved until single tokens are left. A token reads the latent of the region it is a child of, so the two
tokens of a pair share a latent (MtPC paper, section 3; the left part of an odd region has half its length, rounded half
to even).

Filtering walks the tree depth first. Each open region keeps one tensor: its weights while its left child is read, then
the message of that left child, which its own upward message needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vllm_mtpc.circuits.base import Circuit, Latents
from vllm_mtpc.kernels.filter import Instruction, Op, Program


@dataclass
class _Region:
    """Tokens [lo, hi); two children when there is more than one; `index` into the inner sums (root: -1)."""

    lo: int
    hi: int
    children: tuple[_Region, ...] = ()  # none, or two
    index: int = -1

    @property
    def height(self) -> int:
        return max((1 + child.height for child in self.children), default=0)


def _build_tree(lo: int, hi: int) -> _Region:
    region = _Region(lo, hi)
    if hi - lo > 1:
        middle = lo + round((hi - lo) / 2)
        region.children = _build_tree(lo, middle), _build_tree(middle, hi)
    return region


def _inner_regions(root: _Region) -> list[_Region]:
    """Regions below the root with two children, leaves to root, left to right within a height."""
    found, todo = [], [*root.children]
    while todo:
        region = todo.pop()
        if region.children:
            found.append(region)
            todo += region.children
    return sorted(found, key=lambda region: (region.height, region.lo))


class BTree(Circuit):
    """A balanced binary tree of latents."""

    name = "btree"

    @cached_property
    def tree(self) -> _Region:
        """The root region."""
        tree = _build_tree(0, self.window)
        for index, region in enumerate(_inner_regions(tree)):
            region.index = index
        return tree

    @cached_property
    def latents(self) -> Latents:
        """As in Circuit."""
        regions = _inner_regions(self.tree)
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
        """As in Circuit."""
        program: list[list[Instruction]] = [[]]
        _walk(self.tree, program)
        program[-1] = []  # nothing is read after the last token
        return program


def _walk(region: _Region, program: list[list[Instruction]]) -> None:
    """Append the instructions of a region to the last list; reading a token begins a new list."""
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
