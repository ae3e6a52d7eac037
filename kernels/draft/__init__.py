"""Drafts of a circuit, from the head's logits and the verifier's token; see README.md here."""
