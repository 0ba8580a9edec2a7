"""The parameter table of a batch: one row of float32 numbers a sample."""
