"""What a step will hold, before any step: the model on fake tensors, phase by phase."""
