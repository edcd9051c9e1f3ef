"""onecard: your text, your card, your model.

From raw text to a served language model on one consumer GPU (or a CPU, for small models), in private.
Importing this package does no work and imports nothing heavy.
"""

__version__ = "0.1.0"
