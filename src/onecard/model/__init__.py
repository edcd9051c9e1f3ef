"""Architectures, their attention over packed documents, and a loss that never holds all logits."""
