"""From results to the pictures and tables of the documentation."""
