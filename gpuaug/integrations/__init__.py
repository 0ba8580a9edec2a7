"""Code that training frameworks need beyond a recipe in the documentation. Each file imports one framework."""
