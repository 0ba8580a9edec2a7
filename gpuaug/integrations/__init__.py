"""Integrations with training frameworks for which a recipe in the documentation is not enough: one file per framework."""
