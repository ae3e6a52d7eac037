"""Publishing a head on the hub: `vllm-mtpc push`."""
