"""The loader that the training loop iterates."""
