"""Binary tree of latents: every region of two or more tokens has one, its row given by the region above.

The window is halved until single tokens are left; the left part of an odd region has half its length, rounded half to
even. A token reads the latent of the region it is a child of, so the two tokens of a pair share a latent (MtPC paper,
section 3).

Filtering walks the tree depth first. Each open region keeps one tensor: its weights while its left child is read, then
the message of that left child, which its own upward message needs.
"""

from __future__ import annotations

from functools import cached_property

from vllm_mtpc.circuits.base import Circuit, Latents
from vllm_mtpc.kernels.filter import Instruction, Op, Program

Region = tuple[int, int]  # tokens [lo, hi)


def _halves(region: Region) -> tuple[Region, ...]:
    """The children of a region; none of a single token."""
    lo, hi = region
    middle = lo + round((hi - lo) / 2)
    return ((lo, middle), (middle, hi)) if hi - lo > 1 else ()


def _height(region: Region) -> int:
    return max((1 + _height(half) for half in _halves(region)), default=0)


class BTree(Circuit):
    """A balanced binary tree of latents."""

    name = "btree"

    @cached_property
    def regions(self) -> dict[Region, int]:
        """The latent of every region of two or more tokens: the root's, then leaves to root, left to right."""
        regions = [(0, self.window)]
        for region in regions:
            regions += [half for half in _halves(region) if half[1] - half[0] > 1]
        below = sorted(regions[1:], key=lambda region: (_height(region), region))
        return {region: latent for latent, region in enumerate([regions[0], *below])}

    @cached_property
    def latents(self) -> Latents:
        above = {half: latent for region, latent in self.regions.items() for half in _halves(region)}
        parents = [above[region] for region in list(self.regions)[1:]]
        return Latents(parents, [above[k, k + 1] for k in range(self.window)])

    @cached_property
    def program(self) -> Program:
        program: list[list[Instruction]] = [[]]
        self._walk((0, self.window), program)
        program[-1] = []  # nothing is read after the last token
        return program

    def _walk(self, region: Region, program: list[list[Instruction]]) -> None:
        """Append the instructions of a region to the last list; reading a token begins a new list."""
        if region not in self.regions:
            program.append([])
            return
        (left, right), index = _halves(region), self.regions[region] - 1
        if index >= 0:
            program[-1].append(Instruction(Op.TRANSITION, index))
        program[-1].append(Instruction(Op.PUSH))
        self._walk(left, program)
        program[-1].append(Instruction(Op.SIBLING))
        self._walk(right, program)
        if index >= 0:
            program[-1].append(Instruction(Op.UPWARD, index))
