"""PTP drafts on Model Runner V2: the target itself, with a gated LoRA, on rows that carry uniform numbers."""
