"""Training data: names of data to packed rows of tokens."""
