"""torch's optimizers: those that have a kernel, and those that have none."""
