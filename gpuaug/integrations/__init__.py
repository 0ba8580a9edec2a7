"""Integrations with training frameworks that need more than a recipe in the documentation. Each file imports one framework."""
