"""Parameter table of a batch: one float32 row per sample."""
