"""Integrations with training frameworks that need code in addition to the documentation: one file per framework."""
