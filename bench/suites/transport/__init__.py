"""From the host to the card: feeds, the cost of a ``next``, and the lifetime of memory."""
