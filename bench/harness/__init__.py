"""How it is measured: flags, rounds, loops, timing, and the rows of a result."""
