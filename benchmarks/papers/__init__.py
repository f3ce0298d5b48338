"""The experiments of three papers, repeated with protrain: ProTrain (arXiv 2406.08334), SSDTrain (2408.10013), PatrickStar
(2108.05818)."""
