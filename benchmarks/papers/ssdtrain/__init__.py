"""SSDTrain, arXiv 2408.10013."""
