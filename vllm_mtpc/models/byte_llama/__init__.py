"""Byte-level Llama (`TPULlamaForCausalLM`): a Llama with an embedding of the subword that ends at each token."""
