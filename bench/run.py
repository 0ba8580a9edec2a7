"""Measure suites one after another and write bench/results/SUITE.json for each.

    python -m bench run                            all of them, tens of minutes on an H200
    python -m bench run chain branches --quick     some, with flags that all of these take

One that fails does not stop the others; the failures are listed at the end. ``python -m bench.SUITE --help`` has a suite's own
flags. On a CPU, give small sizes: ``--size 32 --batch 4``.
"""

import importlib
import shlex
import sys
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from time import perf_counter

import torch

from bench import common
from bench.plot import RESULTS

# Few, short rounds: the windows themselves are a small part of the time that seven sizes take. Rows that take long are left
# out of the largest ones, where a window this short would see only what had queued up before it.
_SIZES = ["--batch", "8,16,32,64,128,256,512", "--seconds", "0.3", "--repeats", "2", "--slowest", "0.15"]

# Percents are asked here, of loops that differ by as much from round to round.
_DEPTHS = ["--batch", "8,16,32,64,128,256", "--rows", "streamed;streamed, auto", "--seconds", "0.3", "--repeats", "8"]

# Name of the result, the module that makes it, and the flags it needs for that.
EXPERIMENTS = {
    "encoder_decoder": ("encoder_decoder", []),
    "encoder_decoder_sizes": (
        "encoder_decoder",
        ["--suite", "encoder_decoder_sizes", "--rows", "two streams, as published;timm PrefetchLoader;streamed", *_SIZES],
    ),
    "encoder_decoder_depths": ("encoder_decoder", ["--suite", "encoder_decoder_depths", *_DEPTHS]),
    "encoder_decoder_resident": ("encoder_decoder", ["--resident"]),
    "encoder_decoder_alike": ("encoder_decoder", ["--alike", "--batch", "8,16,64", "--seconds", "0.25", "--repeats", "5"]),
    "frozen_resnet": ("frozen_resnet", []),
    "classifier": ("classifier", []),
    "classifier_sizes": (
        "classifier",
        [
            "--suite",
            "classifier_sizes",
            "--rows",
            "workers;two streams, as published;timm PrefetchLoader;DALI;streamed;streamed, fused",
            *_SIZES,
        ],
    ),
    "classifier_depths": ("classifier", ["--suite", "classifier_depths", *_DEPTHS]),
    "resnet_step": ("resnet_step", []),
    "chain": ("chain", []),
    "branches": ("branches", []),
    "handover": ("handover", []),
    "lifetimes": ("lifetimes", []),
    "items": ("items", []),
    "feeds": ("feeds", []),
    "augment": ("augment", []),
    "ragged": ("ragged", []),
    "views": ("views", []),
    "detection": ("detection", []),
    "accuracy": ("accuracy", []),
    "lanes": ("lanes", []),
    "profiles": ("profiles", []),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    # By hand: flags that this parser does not know may have values, which it would take for suites.
    suites = list(takewhile(lambda word: not word.startswith("-"), words))
    parser = ArgumentParser(
        prog="python -m bench run",
        usage="%(prog)s [SUITE ...] [--list] [--results FOLDER] [flags of these suites]",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--list", action="store_true", help="print what each suite measures, and the flags that it is given")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write into (default: %(default)s)")
    options, flags = parser.parse_known_args(words[len(suites) :])
    if options.list:
        print(listing())
        return 0
    unknown = [name for name in suites if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"suites must be among {', '.join(EXPERIMENTS)}, got {', '.join(unknown)}. See --list.")
    late = [word for word in flags if word in EXPERIMENTS]
    if late:
        parser.error(f"suites must come before flags, got {', '.join(late)} after {flags[0]}. Name them first.")
    failed = [name for name in suites or EXPERIMENTS if not _succeeds(name, flags, options.results)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def listing() -> str:
    """Every suite with the first line of what it says about itself, and the flags that make it."""
    width = max(map(len, EXPERIMENTS)) + 2
    lines = []
    for name, (module, own) in EXPERIMENTS.items():
        doc = importlib.import_module(f"bench.{module}").__doc__ or ""
        lines.append(f"{name:{width}}{doc.splitlines()[0] if doc else ''}")
        if own:
            lines.append(f"{'':{width}}{shlex.join(own)}")
    return "\n".join(lines)


def _succeeds(name: str, flags: Sequence[str], folder: Path) -> bool:
    module, own = EXPERIMENTS[name]
    start = perf_counter()
    done = False
    try:
        importlib.import_module(f"bench.{module}").main([*own, *flags, "--json", str(folder / f"{name}.json")])
        done = True
    except SystemExit as stop:  # a flag that this suite does not take, or nothing that it can measure here
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    print(f"{name}: {perf_counter() - start:.0f} s in all", flush=True)
    common.release(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return done
