"""Measures the cases of a suite, prints its tables and writes its JSON file."""

import gc
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.harness.console import console
from bench.harness.optional_rows import OptionalRow, PeerError, Skipped, select_rows
from bench.harness.processes import settle
from gpuaug.benchkit import results
from gpuaug.benchkit.environment import environment
from gpuaug.benchkit.windows import Row, Variant, interleave, summarise

Build = Callable[[ExitStack], Sequence[OptionalRow]]
"""Makes the rows of one case, and registers their clean-up on the stack, which is closed after the case."""

Figures = Callable[[Variant], dict[str, Any]]
"""Measures further figures of a row, after all windows of its case and before its clean-up."""


def measure(
    suite: str,
    options: Namespace,
    cases: Iterable[tuple[dict[str, Any], Build]],
    *,
    baseline: str | Sequence[str],
    ours: Sequence[str] = (),
    ceilings: Sequence[str] = (),
    figures: Figures | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Measure the cases one after another, each torn down before the next, and show a table for each.

    Rows that cannot run on this machine are printed with the reason and kept in ``settings["skipped"]``.

    Args:
        suite: Name of the result.
        options: The result of ``flags.read``.
        cases: (labels of the rows: ``batch_size``, ``case``; function that builds the rows) of each case.
        baseline: Name of the variant that ratios are relative to, or several names, of which each case has one variant.
            ``None``: no ratios.
        ours: Names of variants that run through gpuaug, which plots show in another colour.
        ceilings: Names of variants that leave work out, as upper bounds for the others.
        figures: Measures further figures of each row. Rates and ratios are then of images instead of steps, so that a slow row
            may process a part of a batch in a step, and rows have no ``host_ms``.
        settings: Further settings to keep with the result.
    """
    suite = options.suite or suite
    machine = environment(options.device)
    start = perf_counter()
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    slow: dict[str, str] = {}
    baselines = (baseline,) if isinstance(baseline, str) else baseline
    settings |= {"baseline": baselines[0] if len(baselines) == 1 else None, "ours": list(ours)}
    settings |= {"ceilings": list(ceilings), "skipped": skipped}
    for labels, build in cases:
        measured, left_out, more = _case(build, options, baselines, slow, figures)
        found = [row.record(**labels) for row in measured]
        for record in found:
            if figures is not None:
                del record["steps_per_s"], record["host_ms"]
            record |= more[record["name"]]
        rows += found
        for row in left_out:
            if not any((row.name, row.reason) == (other["name"], other["reason"]) for other in skipped):
                console.print(f"{suite}: {_title(labels)}: {row.name} skipped: {row.reason}", markup=False)
            skipped.append(labels | {"name": row.name, "reason": row.reason})
        console.print(results.table(found, f"{suite}: {_title(labels)}"))
        slow |= _slow(measured, labels, options, baselines)
        if options.json is not None:
            # The result so far: an interruption then loses one case only.
            so_far = results.result(suite, rows=rows, settings=settings, device=options.device, environment=machine)
            results.write(options.json, so_far)
    return finish(suite, options, rows, settings, machine, start)


def _case(
    build: Build, options: Namespace, baselines: Sequence[str], slow: dict[str, str], figures: Figures | None
) -> tuple[list[Row], list[Skipped], dict[str, dict[str, Any]]]:
    """(rows, skipped rows, further figures by name) of one case. After a peer's error the case starts anew without it."""
    reasons = dict(slow)
    while True:
        # Every case starts from the same seed, whichever cases ran before it.
        torch.manual_seed(0)
        with ExitStack() as stack:
            made = [
                Skipped(row.name, reasons[row.name]) if row.name in reasons else row
                for row in select_rows(build(stack), options.rows, baselines)
            ]
            variants = [row for row in made if isinstance(row, Variant)]
            left_out = [row for row in made if isinstance(row, Skipped)]
            del made
            try:
                windows = interleave(
                    variants, device=options.device, seconds=options.seconds, repeats=options.repeats, settle=settle
                )
            except PeerError as error:
                reasons[error.name] = error.reason
                windows = None
            more = {row.name: row.notes() | (figures(row) if figures is not None else {}) for row in variants if windows}
            del variants
        release(options.device)
        if windows is not None:
            if figures is not None:
                windows = {name: [replace(each, steps=each.images) for each in own] for name, own in windows.items()}
            baseline = next((name for name in baselines if name in windows), None)
            return summarise(windows, baseline=baseline), left_out, more


def _slow(measured: Sequence[Row], labels: dict[str, Any], options: Namespace, baselines: Sequence[str]) -> dict[str, str]:
    """Name: reason, for each row that ``--slowest`` leaves out of all later cases."""
    if options.slowest is None:
        return {}
    took = {row.name: 1 / row.steps_per_s for row in measured if row.name not in baselines}
    more = f"with {_title(labels)}, more than --slowest {options.slowest:g}"
    return {name: f"a step took {step_s:.2g} s {more}" for name, step_s in took.items() if step_s > options.slowest}


def _title(labels: dict[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in labels.items())


def finish(
    suite: str,
    options: Namespace,
    rows: list[dict[str, Any]],
    settings: dict[str, Any],
    machine: dict[str, Any],
    start: float,
) -> dict[str, Any]:
    """Make the result, check it, write it where ``--json`` says, and print how long it took."""
    # Paths of output files are no settings of the measurement.
    left_out = {"device", "json", "suite"}
    flags = {key: value for key, value in vars(options).items() if key not in left_out and not isinstance(value, Path)}
    seconds = perf_counter() - start
    made = results.result(
        suite,
        rows=rows,
        settings=flags | settings | {"took_s": round(seconds, 1)},
        device=options.device,
        environment=machine,
    )
    results.check(made)
    if options.json is not None:
        results.write(options.json, made)
    console.print(f"{suite}: {seconds:.0f} s" + (f", written to {options.json}" if options.json else ""))
    return made


def release(device: torch.device) -> None:
    """Free the last case's memory and workers, so that the next one starts with an empty card."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
