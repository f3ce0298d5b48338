"""A torch model: its blocks, its parameters and how they lie in chunks, what a forward finds and changes in it."""
