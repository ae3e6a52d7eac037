"""What `speculative_config` may say of a head, checked where an engine is configured."""
