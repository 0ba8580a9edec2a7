"""The measuring: flags, rounds, loops, timing, and the rows of a result."""
