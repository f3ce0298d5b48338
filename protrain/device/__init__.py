"""What computes, and what depends on it."""
