"""The experiments behind the figures in the documentation. ``python -m bench`` runs them; see ``--help``."""
