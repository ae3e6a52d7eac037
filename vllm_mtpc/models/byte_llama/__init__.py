"""Byte-level Llama (`TPULlamaForCausalLM`): a Llama whose input embedding also reads the subword that ends here."""
