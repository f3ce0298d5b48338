"""PatrickStar, arXiv 2108.05818."""
