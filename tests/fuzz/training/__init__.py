"""Random training scripts, on several ranks against one process with the batches of all."""
