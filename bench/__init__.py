"""Benchmarks, whose results the documentation shows. ``python -m bench --help`` lists the commands.

Folders, in order of dependency: data, harness, figures and peers, suites. A folder imports only from earlier folders.
"""
