"""Training of PTP heads: their trainer and their training step."""
