"""The suites behind the figures of the documentation. ``python -m bench --help`` lists the commands.

Rooms, each of which imports only from those before it: data, harness, figures and peers, suites.
"""
