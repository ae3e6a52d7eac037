"""Expected tokens/step of a head on the target's own text, and a comparison with the served counters."""
