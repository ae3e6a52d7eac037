"""The `config.json` of heads (base.py, mtpc_config.py, ptp_config.py) and configs of byte-level targets."""
