"""What a head is worth: expected tokens/step on the target's own text, generation, and a check of what is served.

Plain torch and transformers; only the child process of ``doctor`` starts vLLM.
"""
