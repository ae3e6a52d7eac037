"""Convert checkpoints of other projects into heads of this package."""
