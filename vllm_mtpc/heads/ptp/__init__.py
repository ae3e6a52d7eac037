"""PTP heads (arXiv 2512.21323): the target with a gated LoRA, on rows that carry random numbers instead of tokens."""
