"""The standard normal's distribution function and its inverse in Triton, float64.

PyTorch compiles its `ndtri` with NVRTC on a GPU. This one is Acklam's (2003), with a relative error below 1.2e-9.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ndtri(p):
    """Return the x with ndtr(x) = p, of p float64; -inf at 0 and below, inf at 1 and above."""
    q, tail = p - 0.5, tl.minimum(p, 1.0 - p)
    r = q * q
    above = (((-39.69683028665376 * r + 220.9460984245205) * r - 275.9285104469687) * r + 138.3577518672690) * r
    above = (above - 30.66479806614716) * r + 2.506628277459239
    below = (((-54.47609879822406 * r + 161.5858368580409) * r - 155.6989798598866) * r + 66.80131188771972) * r
    central = q * above / ((below - 13.28068155288572) * r + 1.0)
    s = tl.sqrt(-2.0 * tl.log(tl.where(tail > 0.0, tail, 0.5)))
    above = ((-7.784894002430293e-3 * s - 0.3223964580411365) * s - 2.400758277161838) * s - 2.549732539343734
    below = ((7.784695709041462e-3 * s + 0.3224671290700398) * s + 2.445134137142996) * s + 3.754408661907416
    outer = ((above * s + 4.374664141464968) * s + 2.938163982698783) / (below * s + 1.0)
    outer = tl.where(tail > 0.0, outer, float("-inf"))
    return tl.where(tail > 0.02425, central, tl.where(q < 0.0, outer, -outer))


@triton.jit
def ndtr(x):
    """Return the standard normal's distribution function at x float64; absolute error about 1e-16."""
    return 0.5 + 0.5 * tl.erf(x * 0.70710678118654752440)
