"""Text in any encoding becomes a corpus, a token store and batches."""
