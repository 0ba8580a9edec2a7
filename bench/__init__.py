"""The experiments behind the figures in the documentation. Run one with ``python -m bench.NAME``; see ``--help``."""
