"""Benchmarks: measure suites, compare results, and write pictures and tables.

    python -m bench run                  measure all suites, or the suites that are given
    python -m bench SUITE                measure one suite, with further flags
    python -m bench accuracy --data DIR  train on torchvision's images and on gpuaug's, and compare top-1
    python -m bench kernels              measure each kernel of gpuaug; needs a GPU, and is not a suite of run
    python -m bench soak                 a long run of small batches, in which no resource of the process may grow
    python -m bench chaos                loops with random delays, breaks, errors, kills and resumes, compared with depth=0
    python -m bench compare A B          compare two results of one suite, row by row
    python -m bench pair CHECKOUT        measure this checkout and another, in alternating processes
    python -m bench plot                 draw a picture of every result
    python -m bench tables               write the tables in the documentation
    python -m bench sheets               draw the same augmentations by Kornia and by gpuaug.fuse
    python -m bench show                 draw photographs with gpuaug.show
    python -m bench photographs DIR      pack photographs of installed packages for another machine
    python -m bench env                  print the description of this machine that results contain

``python -m bench COMMAND --help`` shows the flags of a command, ``python -m bench run --list`` the suites.
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
"""Command: module whose ``main`` runs it."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        # Each command parses its flags, including --help; run passes unknown flags on to the suites.
        commands.add_parser(name, add_help=False)
    options, command_arguments = parser.parse_known_args(argv)
    command_main = importlib.import_module(COMMANDS[options.command]).main
    status = command_main(command_arguments, SUITES) if options.command == "run" else command_main(command_arguments)
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
