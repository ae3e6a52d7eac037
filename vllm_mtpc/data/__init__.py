"""Training data: from what the user names to packed rows of tokens."""
