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
    """Tokens [lo, hi); children when there is more than one; `index` into the inner sums (root: -1)."""

    lo: int
    hi: int
    left: Region | None = None
    right: Region | None = None
    index: int = -1

    @property
    def height(self) -> int:
        return 1 + max(self.left.height, self.right.height) if self.left and self.right else 0


def build_tree(lo: int, hi: int) -> Region:
    region = Region(lo, hi)
    if hi - lo > 1:
        middle = lo + round((hi - lo) / 2)
        region.left, region.right = build_tree(lo, middle), build_tree(middle, hi)
    return region


def inner_regions(root: Region) -> list[Region]:
    """Regions with a sum of their own below the root, leaves to root, left to right within a height."""
    found, todo = [], [root.left, root.right]
    while todo:
        region = todo.pop()
        if region is not None and region.left is not None:
            found.append(region)
            todo += [region.left, region.right]
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
            for child in (region.left, region.right):
                if child.left is None:
                    reads[child.lo] = region.index + 1
                else:
                    parents[child.index] = region.index + 1
        return Latents(parents, reads)

    @cached_property
    def program(self) -> Program:
        return [self._descend(self.tree), *(self._close(k) for k in range(self.window - 1)), []]

    def _path_to(self, k: int) -> list[tuple[Region, bool]]:
        """Open regions above token k, root first, each with whether k lies in its right child."""
        path, region = [], self.tree
        while region.left is not None:
            is_right = k >= region.right.lo
            path.append((region, is_right))
            region = region.right if is_right else region.left
        return path

    def _close(self, k: int) -> list[Instruction]:
        """Regions that end at token k send their messages up; then down to token k + 1."""
        path = self._path_to(k)
        found = []
        while path[-1][1]:
            found.append(Instruction(Op.UPWARD, path.pop()[0].index))
        return [*found, Instruction(Op.SIBLING), *self._descend(path[-1][0].right)]

    @staticmethod
    def _descend(region: Region) -> list[Instruction]:
        """Down the left edge of `region` to its first token."""
        found = []
        while region.left is not None:
            if region.index >= 0:
                found.append(Instruction(Op.TRANSITION, region.index))
            found.append(Instruction(Op.PUSH))
            region = region.left
        return found
