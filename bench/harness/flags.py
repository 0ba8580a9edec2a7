"""Command-line flags that every suite takes."""

from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import torch

from gpuaug.benchkit.environment import allowed_cores


def parser(
    name: str,
    doc: str,
    *,
    batch: str,
    size: int = 256,
    seconds: float = 0.6,
    repeats: int = 5,
    spare: int = 4,
    sweeps: bool = False,
) -> ArgumentParser:
    """Return a parser of the flags that every suite takes, with the defaults of one suite.

    Args:
        name: Name of the suite.
        doc: Description in ``--help``.
        batch: Batch sizes, separated by commas.
        size: Side of the images in pixels.
        seconds: Length of one window.
        repeats: Rounds of one window per variant.
        spare: Number of cores that workers leave free, unless ``--workers`` is given.
        sweeps: Whether the suite is also run over many batch sizes, under another name, which adds flags.
    """
    suite_parser = ArgumentParser(prog=f"python -m bench {name}", description=doc, formatter_class=RawDescriptionHelpFormatter)
    suite_parser.add_argument("--device", type=torch.device, help="default: the GPU if there is one, else the CPU")
    suite_parser.add_argument("--batch", type=numbers, help=f"batch sizes, comma-separated (default: {batch})")
    suite_parser.add_argument("--size", type=int, default=size, help="side of the images in pixels (default: %(default)s)")
    suite_parser.add_argument("--seconds", type=float, help=f"length of one window (default: {seconds})")
    suite_parser.add_argument("--repeats", type=int, help=f"rounds of one window per variant (default: {repeats})")
    suite_parser.add_argument(
        "--workers", type=int, help=f"DataLoader workers (default: up to {16 - spare}, {spare} cores left free)"
    )
    suite_parser.add_argument(
        "--rows", metavar="NAME;NAME", help="measure only these rows, separated by semicolons, and the baseline"
    )
    # For the suite priorities: measures the rows of --rows only, each also inside gpuaug.step_first.
    suite_parser.add_argument("--step-first", action="store_true", help=SUPPRESS)
    suite_parser.add_argument("--quick", action="store_true", help="two short rounds, and not the largest batch size")
    suite_parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there")
    suite_parser.set_defaults(suite_defaults=(numbers(batch), seconds, repeats, spare), suite=None, slowest=None)
    if sweeps:
        suite_parser.add_argument("--suite", metavar="NAME", help="name of the result (default: the suite's)")
        suite_parser.add_argument(
            "--slowest", type=float, metavar="SECONDS", help="leave a row out of later batch sizes after a step took longer"
        )
    return suite_parser


def parse(suite_parser: ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """Parse ``argv``, and fill in defaults that depend on the machine or on ``--quick``."""
    options = suite_parser.parse_args(argv)
    batch, seconds, repeats, spare = options.suite_defaults
    del options.suite_defaults
    if options.quick:
        batch = batch[:-1] or batch
        seconds = 0.25
        repeats = 2
    options.batch = options.batch or batch
    options.seconds = options.seconds or seconds
    options.repeats = options.repeats or repeats
    if options.device is None:
        options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.device.type == "cuda":
        options.device = torch.device("cuda", options.device.index or 0)
        torch.cuda.set_device(options.device)
    if options.workers is None:
        options.workers = max(0, min(16, allowed_cores()) - spare)
    return options


def numbers(text: str) -> tuple[int, ...]:
    """Parse whole numbers that are separated by commas."""
    return tuple(int(number) for number in text.split(","))
