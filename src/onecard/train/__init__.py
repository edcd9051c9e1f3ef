"""The one training loop and the verbs that give it an objective and batches."""
