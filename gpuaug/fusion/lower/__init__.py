"""From the user's modules to ops."""
