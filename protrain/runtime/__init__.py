"""A step as it runs: chunks come and go, blocks in their modes, gradients, updates, homes."""
