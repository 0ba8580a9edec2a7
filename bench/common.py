"""What the experiments share: flags, and the way from cases to tables and a JSON file."""

import gc
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gpuaug.bench import results
from gpuaug.bench.environment import cores_allowed, environment
from gpuaug.bench.windows import Variant, interleave, summarise

DEPTH = 2
"""Batches that a ``StreamedLoader`` prepares ahead, its default, here by name because discarded steps depend on it."""

Build = Callable[[ExitStack], list[Variant]]
"""Makes the variants of one case; what has to be closed after the case goes on the stack."""

console = Console(width=None if sys.stdout.isatty() else 140)


def parser(doc: str, *, batch: str, size: int = 256, seconds: float = 0.6, repeats: int = 5) -> ArgumentParser:
    """The flags every experiment takes; the defaults are the experiment's own."""
    made = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--device", type=torch.device, help="default: the GPU if there is one, else the CPU")
    made.add_argument("--batch", type=_numbers, help=f"batch sizes, comma-separated (default: {batch})")
    made.add_argument("--size", type=int, default=size, help="side of the images in pixels (default: %(default)s)")
    made.add_argument("--seconds", type=float, help=f"length of one window (default: {seconds})")
    made.add_argument("--repeats", type=int, help=f"rounds of one window per variant (default: {repeats})")
    made.add_argument("--workers", type=int, help="DataLoader workers (default: up to 12, four cores left free)")
    made.add_argument("--rows", metavar="NAME;NAME", help="measure only these, separated by semicolons, and the baseline")
    made.add_argument("--quick", action="store_true", help="two short rounds, and not the largest batch size")
    made.add_argument("--json", type=Path, metavar="PATH", help="write the result there")
    made.set_defaults(usual=(_numbers(batch), seconds, repeats))
    return made


def read(made: ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """Parse ``argv`` and fill in what depends on the machine or on ``--quick``."""
    options = made.parse_args(argv)
    batch, seconds, repeats = options.usual
    del options.usual
    if options.quick:
        batch, seconds, repeats = batch[:-1] or batch, 0.25, 2
    options.batch = options.batch or batch
    options.seconds = options.seconds or seconds
    options.repeats = options.repeats or repeats
    if options.device is None:
        options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.device.type == "cuda":
        options.device = torch.device("cuda", options.device.index or 0)
        torch.cuda.set_device(options.device)
    if options.workers is None:
        options.workers = max(0, min(12, cores_allowed() - 4))
    return options


def measure(
    suite: str,
    options: Namespace,
    cases: Iterable[tuple[dict[str, Any], Build]],
    *,
    baseline: str,
    ours: Sequence[str] = (),
    ceilings: Sequence[str] = (),
    **settings: Any,
) -> dict[str, Any]:
    """Measure the cases one after another, each torn down before the next, and show a table for each.

    Args:
        suite: Name of the result.
        options: From ``read``.
        cases: For each case the labels of its rows (``batch_size``, ``case``) and what builds its variants.
        baseline: The variant that ratios are taken to.
        ours: Variants that run through gpuaug, which plots show in another colour.
        ceilings: Variants that leave work out to show what the rest could reach at most.
        settings: Further settings to keep with the result.
    """
    found_environment = environment(options.device)
    start = perf_counter()
    rows: list[dict[str, Any]] = []
    for labels, build in cases:
        # Every case starts from the same numbers, whichever cases ran before it.
        torch.manual_seed(0)
        with ExitStack() as stack:
            variants = _chosen(build(stack), options.rows, baseline)
            windows = interleave(variants, device=options.device, seconds=options.seconds, repeats=options.repeats)
            del variants
        found = [row.record(**labels) for row in summarise(windows, baseline=baseline)]
        rows += found
        title = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in labels.items())
        console.print(results.table(found, f"{suite}: {title}"))
        release(options.device)
    settings |= {"baseline": baseline, "ours": list(ours), "ceilings": list(ceilings)}
    return finish(suite, options, rows, settings, found_environment, start)


def finish(
    suite: str,
    options: Namespace,
    rows: list[dict[str, Any]],
    settings: dict[str, Any],
    found_environment: dict[str, Any],
    start: float,
) -> dict[str, Any]:
    """Make the result, check it, write it where ``--json`` says, and print how long it took."""
    flags = {key: value for key, value in vars(options).items() if key not in {"json", "device"}}
    seconds = perf_counter() - start
    made = results.result(
        suite,
        rows=rows,
        settings=flags | settings | {"took_s": round(seconds, 1)},
        device=options.device,
        environment=found_environment,
    )
    results.check(made)
    if options.json is not None:
        results.write(options.json, made)
    console.print(f"{suite}: {seconds:.0f} s" + (f", written to {options.json}" if options.json else ""))
    return made


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print rows that are not steps per second, a column for each key they have."""
    table = Table(title=title, title_justify="left")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for key in keys:
        table.add_column(key.replace("_", " "), justify="left" if key in {"name", "case"} else "right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in map(row.get, keys)))
    console.print(table)


def release(device: torch.device) -> None:
    """Give back what the last case held, so that the next one starts with an empty card and no workers beside it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _chosen(variants: list[Variant], rows: str | None, baseline: str) -> list[Variant]:
    if rows is None:
        return variants
    wanted, known = {baseline, *rows.split(";")}, [variant.name for variant in variants]
    if not wanted <= set(known):
        raise SystemExit(f"--rows must be among {'; '.join(known)}, got {rows}. Leave it out to measure all of them.")
    return [variant for variant in variants if variant.name in wanted]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
