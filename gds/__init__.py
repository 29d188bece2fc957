"""Model weights into memory, inside the inference process. Nothing of the daemon imports it."""
