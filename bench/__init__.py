"""Benchmarks, whose results the documentation shows. ``python -m bench --help`` lists the commands.

Folders, each of which imports only from those before it: data, harness, figures and peers, suites.
"""
