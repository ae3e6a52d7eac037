"""The `config.json` of heads (base.py, mtpc.py, ptp.py) and configs of byte-level targets."""
