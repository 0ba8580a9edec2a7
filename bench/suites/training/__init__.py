"""Suites of training loops: streamed, and as users write them."""
