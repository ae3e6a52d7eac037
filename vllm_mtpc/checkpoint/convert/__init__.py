"""Checkpoints of the papers' authors, read into heads of this package."""
