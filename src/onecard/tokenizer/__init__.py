"""Training a tokenizer, its chat template, and its report."""
