"""Training of heads (`vllm-mtpc train`): options, data, losses, the loop, and what is written. See docs/training.md."""
