"""``StreamedLoader``, its iterator, and its state for checkpoints."""
