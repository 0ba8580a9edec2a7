"""Training loops: streamed, beside the loops that users write."""
