"""Measure suites one after another and write bench/results/SUITE.json for each.

    python -m bench run                            all of them, tens of minutes on an H200
    python -m bench run chain branches --quick     some, with flags that all of these take

A suite that fails does not stop the others; the failures are listed at the end. ``python -m bench SUITE --help`` shows its
flags. On a CPU, give small sizes: ``--size 32 --batch 4``.
"""

import importlib
import shlex
import sys
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from time import perf_counter

import torch

from bench.harness import measurement
from bench.harness.result_rows import RESULTS

Suites = Mapping[str, tuple[str, Sequence[str]]]
"""Name of a suite: (its module, flags for that module)."""


def main(argv: Sequence[str] | None, all_suites: Suites) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Suites are split off here, because the parser would take values of unknown flags for suites.
    requested = list(takewhile(lambda argument: not argument.startswith("-"), arguments))
    parser = ArgumentParser(
        prog="python -m bench run",
        usage="%(prog)s [SUITE ...] [--list] [--results FOLDER] [flags of these suites]",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--list", action="store_true", help="print the first line of each suite's description, and its flags")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write into (default: %(default)s)")
    options, flags = parser.parse_known_args(arguments[len(requested) :])
    if options.list:
        print(listing(all_suites))
        return 0
    unknown = [name for name in requested if name not in all_suites]
    if unknown:
        parser.error(f"suites must be among {', '.join(all_suites)}, got {', '.join(unknown)}. See --list.")
    misplaced = [argument for argument in flags if argument in all_suites]
    if misplaced:
        parser.error(f"suites must come before flags, got {', '.join(misplaced)} after {flags[0]}. Name them first.")
    failed = [name for name in requested or all_suites if not _succeeds(name, *all_suites[name], flags, options.results)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def listing(all_suites: Suites) -> str:
    """Return a text with the first line of the docstring, and the flags, of every suite."""
    width = max(map(len, all_suites)) + 2
    lines = []
    for name, (module, suite_flags) in all_suites.items():
        doc = importlib.import_module(module).__doc__ or ""
        lines.append(f"{name:{width}}{doc.splitlines()[0] if doc else ''}")
        if suite_flags:
            lines.append(f"{'':{width}}{shlex.join(suite_flags)}")
    return "\n".join(lines)


def _succeeds(name: str, module: str, suite_flags: Sequence[str], user_flags: Sequence[str], folder: Path) -> bool:
    start = perf_counter()
    succeeded = False
    try:
        importlib.import_module(module).main([*suite_flags, *user_flags, "--json", str(folder / f"{name}.json")])
        succeeded = True
    except SystemExit as stop:  # e.g. an unknown flag, or no row that can run on this machine
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    print(f"{name}: {perf_counter() - start:.0f} s in all", flush=True)
    measurement.release(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return succeeded
