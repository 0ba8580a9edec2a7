"""Pictures and tables of the documentation, from stored results."""
