"""`vllm-mtpc batch`: many prompts from files to files, resumed where it was stopped."""
