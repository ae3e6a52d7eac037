"""`naive.draft` in Triton, on two paths (README.md): drafts, conditionals as in `draft_logits`, and confidences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from vllm_mtpc.kernels.draft import TILE, is_small, launches
from vllm_mtpc.kernels.filter.kernel import encode
from vllm_mtpc.kernels.filter.program import Program
from vllm_mtpc.kernels.leaf import Bigram, LowRank

# Sizes are derived from registers (README.md), not measured.
REGISTERS = {} if torch.version.hip else {"maxnreg": 128}  # of `draft_rows`: 2 instances of 8 warps at once, 4 of 4
MIN_BLOCK = 64

# Requests of a program instance: they share the first columns of the components' differences, or the product of tiles
# of their biases, which takes 16 rows and more.
LOW_ROWS, BIAS_ROWS = 4, 16

Arguments = dict[str, Any]  # of a kernel, by name


class Leaves(NamedTuple):
    """Logits [B, K, r or 1, V] of K positions."""

    leaf: launches.Leaf
    strides: Arguments  # of a request, a position and a component, in units
    low: Arguments  # differences of the components and their strides
    unit: int


@dataclass(frozen=True)
class Batch:
    """The arguments of one call: B requests, K drafts, r components, V columns of a leaf, F inner sums."""

    shape: tuple[int, int, int, int]  # B, K, r, V
    leaves: Leaves
    given: Leaves | None  # those of x_1, [B, 1, r or 1, V]; None: its evidence is known
    bias: launches.Bias
    first: Tensor | None  # [B] int64, x_1
    circuit: launches.Circuit
    requests: launches.Requests
    rows: Arguments  # slots and pos [B]
    outputs: Arguments  # tokens and confidences [B, K], with the stride of a row
    cache: launches.Cache
    draw: bool


class CircuitDrafter:
    """Drafts of batches of circuits of one program.

    Args:
        program, num_components, vocab_size, device: of the circuits (r is at most 128), and of all tensors.
        noised_argmax: jit function (logits, keys, mask, seed, pos, temp, IS_DRAFTING, USE_FP64) -> (value, index) of
            one vector: vLLM's `gumbel_noised_argmax`, the only source of noise.
        use_fp64: whether noised values are compared in float64.
        one_launch: which path; None chooses by the size of a leaf.
        ids: [Vd] int64, strictly rising, the tokens of a leaf's columns [B, K, r, Vd], or None; not without evidence.
            Tokens, noise, `bigram.source`, `allowed` and cache are those of the V tokens.
    """

    def __init__(
        self,
        program: Program,
        num_components: int,
        vocab_size: int,
        device: torch.device,
        noised_argmax: Any,
        use_fp64: bool = False,
        one_launch: bool | None = None,
        ids: Tensor | None = None,
    ) -> None:
        self.program, depth = encode(program, device)
        size = triton.next_power_of_2(num_components)
        self.width, self.ids = vocab_size if ids is None else len(ids), ids
        self.one_launch = is_small(num_components, self.width) if one_launch is None else one_launch
        self.sizes = {"R": size, "DEPTH": depth}
        self.noise = {"NOISED_ARGMAX": noised_argmax, "USE_FP64": use_fp64}

    def __call__(
        self,
        evidence: Tensor | None,
        leaf: Tensor,
        root: Tensor,
        inner: Tensor,
        first: Tensor | None = None,
        bigram: Bigram | None = None,
        low: LowRank | None = None,
        *,
        slots: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        pos: Tensor,
        tokens: Tensor,
        confidences: Tensor,
        cache: Tensor | None = None,
        allowed: Tensor | None = None,
        draw: bool = True,
    ) -> None:
        """Write K drafts of every request to `tokens`, with their confidences and conditionals (`cache`).

        Arguments are those of README.md. Without `draw` the draft of every request is the argmax.
        """
        if not tokens.numel():
            return
        leaf = leaf if leaf.stride(3) == 1 else leaf.contiguous()
        given = None
        if evidence is None:
            given = _leaf_arguments(leaf[:, :1], low and low.positions(0, 1))
            leaf, low = leaf[:, 1:], low and low.positions(1)
        bias = launches.Bias()
        if bigram is not None:
            target = bigram.target if bigram.target.stride(2) == 1 else bigram.target.contiguous()
            bias = launches.Bias(bigram.source.contiguous(), target, *target.stride()[:2])
        evidence = None if evidence is None else evidence.contiguous()
        batch = Batch(
            shape=(len(leaf), leaf.shape[1], root.shape[1], leaf.shape[3]),
            leaves=_leaf_arguments(leaf, low), given=given, bias=bias, first=first if bigram or given else None,
            circuit=launches.Circuit(evidence, root.contiguous(), inner.contiguous(), self.program),
            requests=launches.Requests(temperature, seeds, allowed, 0 if allowed is None else allowed.shape[2]),
            rows={"slot_ptr": slots, "pos_ptr": pos},
            outputs={
                "token_ptr": tokens, "token_stride": tokens.stride(0),
                "confidence_ptr": confidences, "confidence_stride": confidences.stride(0),
            },
            cache=launches.Cache() if cache is None else launches.Cache(cache, *cache.stride()[:2]), draw=draw,
        )  # fmt: skip
        (self._draft_rows if self.one_launch else self._draft_blocks)(batch)

    def _sizes(self, leaves: Leaves, bias: launches.Bias) -> tuple[launches.Sizes, int]:
        """Return the sizes of an instance, and its number of warps."""
        low, rank = (0 if x is None else x.shape[1] for x in (leaves.leaf.out_ptr, bias.target_ptr))
        block, warps, rows = triton.next_power_of_2(self.width), 4, self.sizes["R"]
        if rank and not self.one_launch:
            rows = max(rows, BIAS_ROWS)
        if rows * block > TILE:
            block = min(block, max(MIN_BLOCK, TILE // (2 * rows if self.one_launch else rows)))
            warps = 8 if self.one_launch or rows * block > TILE else 4
        requests = BIAS_ROWS if rank else LOW_ROWS if low else 1
        return launches.Sizes(self.sizes["R"], block, requests, leaves.unit, low, rank), warps

    def _draft_rows(self, batch: Batch) -> None:
        """The path of one launch."""
        num_reqs, num_drafts, r, vocab_size = batch.shape
        sizes, warps = self._sizes(batch.leaves, batch.bias)
        chunk = min(triton.next_power_of_2(sizes.RANK), max(1, TILE // sizes.BLOCK))
        launches.draft_rows[(num_reqs,)](
            leaf=batch.leaves.leaf, **batch.leaves.strides, first_ptr=batch.first, bias=batch.bias,
            circuit=batch.circuit, requests=batch.requests, **batch.rows, **batch.outputs, cache=batch.cache,
            num_drafts=num_drafts, num_inner=batch.circuit.inner_ptr.shape[1], r=r, vocab_size=vocab_size,
            map_ptr=self.ids, **self.noise, DRAW=batch.draw, sizes=sizes, DEPTH=self.sizes["DEPTH"],
            BLOCKS=triton.cdiv(self.width, sizes.BLOCK), CHUNK=chunk, num_warps=warps, **REGISTERS,
        )  # fmt: skip

    def _draft_blocks(self, batch: Batch) -> None:
        """The path in blocks of the vocabulary; R: r rounded up to a power of two."""
        num_reqs, num_drafts, r, vocab_size = batch.shape
        sizes, warps = self._sizes(batch.leaves, batch.bias)
        size, blocks = sizes.R, triton.cdiv(self.width, sizes.BLOCK)
        leaves = 1 if sizes.RANK else num_drafts  # normalised together
        buffer = partial(torch.empty, dtype=torch.float32, device=batch.leaves.leaf.ptr.device)
        record_dtype = torch.float64 if self.noise["USE_FP64"] else torch.float32
        buffers = launches.Buffers(
            top_ptr=buffer(num_reqs, leaves, blocks, size),
            total_ptr=buffer(num_reqs, leaves, blocks, size),
            norm_ptr=buffer(num_reqs, leaves, size),
            state_ptr=buffer(1 + self.sizes["DEPTH"], num_reqs, size),
            record_ptr=buffer(blocks, num_reqs, launches.RECORD.value + size, dtype=record_dtype),
        )
        groups = triton.cdiv(num_reqs, sizes.ROWS)
        state = {"r": r, "num_inner": batch.circuit.inner_ptr.size(1), "num_warps": 16 if size > 64 else 4} | self.sizes

        def normalise(leaves: Leaves, count: int, k: int, bias: Arguments, start: bool) -> None:
            own = sizes._replace(UNIT=leaves.unit, RANK=0 if bias["before_ptr"] is None else sizes.RANK)
            read = {"leaf": leaves.leaf, **leaves.strides, **leaves.low, "buffers": buffers, "num_drafts": count}
            launches.leaf_blocks[(groups, blocks, count)](
                **read, **bias, draft=k, batch=num_reqs, r=r, vocab_size=vocab_size, sizes=own,
                num_warps=warps, num_stages=2,  # 3 spill with a token_rank of 256
            )  # fmt: skip
            launches.start_rows[(count, num_reqs)](
                **read, circuit=batch.circuit, first_ptr=batch.first, num_blocks=blocks, CHUNK=max(1, TILE // size),
                START=start, UNIT=own.UNIT, LOW=own.LOW, **state,
            )  # fmt: skip

        if batch.given is not None:
            normalise(batch.given, 1, 0, _bias_arguments(launches.Bias(), None), True)
        for k in range(num_drafts):
            before = batch.first if k == 0 else batch.outputs["token_ptr"][:, k - 1]
            bias = _bias_arguments(batch.bias, before if sizes.RANK else None)
            if k % leaves == 0:
                normalise(batch.leaves, leaves, k, bias, k == 0 and batch.given is None)
            launches.draft_blocks[(groups, blocks)](
                leaf=batch.leaves.leaf, **batch.leaves.strides, **batch.leaves.low, **bias,
                buffers=buffers, requests=batch.requests, **batch.rows, cache=batch.cache,
                k=k, num_drafts=num_drafts, batch=num_reqs, r=r, vocab_size=vocab_size,
                map_ptr=self.ids, **self.noise, DRAW=batch.draw, sizes=sizes, num_warps=warps,
            )  # fmt: skip
            launches.choose[(num_reqs,)](
                record_ptr=buffers.record_ptr, state_ptr=buffers.state_ptr, inner_ptr=batch.circuit.inner_ptr,
                program_ptr=self.program, slot_ptr=batch.rows["slot_ptr"],
                temperature_ptr=batch.requests.temperature_ptr, **batch.outputs, k=k, num_drafts=num_drafts,
                count=blocks, DRAW=batch.draw, COUNT=triton.next_power_of_2(blocks), **state,
            )  # fmt: skip


def _leaf_arguments(logits: Tensor, low: LowRank | None) -> Leaves:
    # in units of 16 where rows are aligned, so that loads are wide; strides may depend on the batch and on K, but
    # whether all are multiples of 16 on the vocabulary alone: nothing is compiled again while serving
    unit = 16 if all(stride % 16 == 0 for stride in logits.stride()[:3]) else 1
    names = "leaf_stride", "k_stride", "z_stride"
    strides = {name: stride // unit for name, stride in zip(names, logits.stride(), strict=False)}
    if low is None:
        return Leaves(launches.Leaf(logits), strides, {"low_ptr": None, "low_stride": 0, "low_k_stride": 0}, unit)
    differences = {"low_ptr": low.low, "low_stride": low.low.stride(0), "low_k_stride": low.low.stride(1)}
    return Leaves(launches.Leaf(logits, low.out, *low.out.stride()[:2]), strides, differences, unit)


def _bias_arguments(bias: launches.Bias, tokens: Tensor | None) -> Arguments:
    return {"bias": bias, "before_ptr": tokens, "before_stride": 0 if tokens is None else tokens.stride(0)}
