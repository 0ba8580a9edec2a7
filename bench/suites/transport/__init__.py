"""Suites of the transfer from the host to the card: files, feeds, the time of a ``next``, and lifetimes of memory."""
