"""The configuration of a head, `config.json`: what all have (base), MtPC heads (mtpc.py), PTP heads (ptp.py)."""
