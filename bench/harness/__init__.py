"""Measuring code that suites share: flags, rounds, loops, timing, and the rows of a result."""
