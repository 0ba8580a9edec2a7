"""The benchmarks: measure, compare two results, and make pictures and tables of them.

    python -m bench run                  measure every suite, or those that are named
    python -m bench compare A B          two results of one suite, row by row
    python -m bench accuracy --data DIR  train on torchvision's images and on gpuaug's, and compare top-1
    python -m bench plot                 a picture of every result
    python -m bench tables               the tables in the documentation
    python -m bench env                  what a result would say about this machine

``python -m bench COMMAND --help`` says more. One experiment by itself, with flags of its own: ``python -m bench.NAME``.
"""

import importlib
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

COMMANDS = ("run", "compare", "accuracy", "plot", "tables", "env")
"""Each is the module of its name."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        # A command parses its flags itself, --help among them: run passes on what it does not know.
        commands.add_parser(name, add_help=False)
    options, rest = parser.parse_known_args(argv)
    status = importlib.import_module(f"bench.{options.command}").main(rest)
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
