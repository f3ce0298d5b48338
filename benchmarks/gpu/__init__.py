"""Training on one GPU inside a budget: protrain beside others."""
