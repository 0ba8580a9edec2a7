"""Run experiments one after another and write bench/results/NAME.json for each.

    python -m bench.run                                  all of them, about a quarter of an hour on an H200
    python -m bench.run --only chain,branches --quick    some, with flags that all of these take

One that fails does not stop the others; the failures are listed at the end.
"""

import importlib
import sys
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch

from bench import common
from bench.plot import RESULTS

# Name of the result, the module that makes it, and the flags it needs for that.
EXPERIMENTS = {
    "encoder_decoder": ("encoder_decoder", []),
    "encoder_decoder_resident": ("encoder_decoder", ["--resident"]),
    "frozen_resnet": ("frozen_resnet", []),
    "classifier": ("classifier", []),
    "resnet_step": ("resnet_step", []),
    "chain": ("chain", []),
    "branches": ("branches", []),
    "handover": ("handover", []),
    "lifetimes": ("lifetimes", []),
    "items": ("items", []),
    "feeds": ("feeds", []),
    "augment": ("augment", []),
    "lanes": ("lanes", []),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names, comma-separated (default: all)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write into (default: %(default)s)")
    options, flags = parser.parse_known_args(argv)
    names = options.only.split(",") if options.only else list(EXPERIMENTS)
    unknown = set(names) - set(EXPERIMENTS)
    if unknown:
        parser.error(f"--only must name experiments, got {', '.join(sorted(unknown))}. Known: {', '.join(EXPERIMENTS)}.")
    failed = []
    for name in names:
        module, own = EXPERIMENTS[name]
        start = perf_counter()
        try:
            importlib.import_module(f"bench.{module}").main([*own, *flags, "--json", str(options.results / f"{name}.json")])
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {perf_counter() - start:.0f} s in all", flush=True)
        common.release(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
