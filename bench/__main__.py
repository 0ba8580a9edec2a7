"""The benchmarks: measure, compare two results, and make pictures and tables of them.

    python -m bench run                  measure every suite, or those that are named
    python -m bench SUITE                measure one suite, with flags of its own
    python -m bench accuracy --data DIR  train on torchvision's images and on gpuaug's, and compare top-1
    python -m bench kernels              the time of each of gpuaug's kernels; needs a GPU, and is not among the suites of run
    python -m bench soak                 a long run of small batches, in which nothing that the process holds may grow
    python -m bench chaos                loops with random delays, breaks, errors, kills and resumes, compared with depth=0
    python -m bench compare A B          two results of one suite, row by row
    python -m bench pair CHECKOUT        this checkout beside another, in processes that take turns
    python -m bench plot                 a picture of every result
    python -m bench tables               the tables in the documentation
    python -m bench sheets               pictures of the same draws through Kornia and through gpuaug.fuse
    python -m bench show                 pictures that gpuaug.show draws of photographs
    python -m bench photographs DIR      photographs of installed packages, packed for another machine
    python -m bench env                  what a result says about this machine

``python -m bench COMMAND --help`` says more, ``python -m bench run --list`` names the suites.
"""

import importlib
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

from bench.suites import SUITES

COMMANDS = {
    "run": "bench.harness.run",
    "compare": "bench.harness.compare",
    "pair": "bench.suites.pair",
    "plot": "bench.figures.plot",
    "tables": "bench.figures.tables",
    "sheets": "bench.figures.sheets",
    "show": "bench.figures.show",
    "env": "bench.harness.env",
    "photographs": "bench.data.photographs",
    "kernels": "bench.suites.augmentation.kernels",
    "soak": "bench.suites.transport.soak",
    "chaos": "bench.suites.transport.chaos",
    **{module.rpartition(".")[2]: module for module, _ in SUITES.values()},
}
"""Command to the module whose ``main`` runs it."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        # A command parses its flags itself, --help among them: run passes on what it does not know.
        commands.add_parser(name, add_help=False)
    options, rest = parser.parse_known_args(argv)
    command = importlib.import_module(COMMANDS[options.command]).main
    status = command(rest, SUITES) if options.command == "run" else command(rest)
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
