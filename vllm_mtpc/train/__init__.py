"""Training of heads (`vllm-mtpc train`): options, losses, trainers, saved states and cards. See docs/training.md."""
