"""EvaByte: a byte-level transformer with EVA attention (exact inside a window, one summary per chunk before it)."""
