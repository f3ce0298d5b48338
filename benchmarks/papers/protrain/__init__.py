"""ProTrain, arXiv 2406.08334."""
