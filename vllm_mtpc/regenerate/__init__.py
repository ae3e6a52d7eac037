"""`vllm-mtpc regenerate`: text that the target writes, from files to files, resumed where it was stopped."""
