"""PTP heads: the target itself, with a gated LoRA, on rows that carry uniform random numbers in place of tokens.

Source: "Parallel Token Prediction for Language Models", arXiv 2512.21323. Nothing is imported here: a config is read
without torch.
"""
