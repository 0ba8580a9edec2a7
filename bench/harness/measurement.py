"""Measure the cases of a suite, print its tables and write its JSON file."""

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
from bench.harness.loops import with_step_first
from bench.harness.optional_rows import OptionalRow, PeerError, SkippedRow, select_rows
from bench.harness.processes import settle
from bench.harness.result_check import check_result
from gpuaug.benchkit import results
from gpuaug.benchkit.environment import environment
from gpuaug.benchkit.windows import Row, Variant, interleave, summarise

Build = Callable[[ExitStack], Sequence[OptionalRow]]
"""Function that creates the rows of a case, and registers their clean-up on the stack, which is closed after the case."""

Figures = Callable[[Variant], dict[str, Any]]
"""Function that measures further figures of a row, after all windows of its case and before its clean-up."""


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
    """Measure cases one after another, with the clean-up of each before the next, and print a table for each.

    Rows that cannot run on this machine are printed with the reason, and listed in ``settings["skipped"]``.

    Args:
        suite: Name of the result.
        options: The result of ``flags.parse``.
        cases: For each case (labels of its rows, with the keys ``batch_size`` and ``case``; function that builds the rows).
        baseline: Name of the row that ratios are relative to, or several names: a case has a row with one of them.
        ours: Names of rows that run through gpuaug, which plots show in another colour.
        ceilings: Names of rows that leave work out: upper bounds for the others.
        figures: Measures further figures of each row. Then rates and ratios are of images instead of steps, so that rows may
            differ in the number of images per step, and rows have no ``host_ms``.
        settings: Further settings of the result.
    """
    suite = options.suite or suite
    machine = environment(options.device)
    start = perf_counter()
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    slow_reasons: dict[str, str] = {}
    baselines = (baseline,) if isinstance(baseline, str) else baseline
    settings |= {"baseline": baselines[0] if len(baselines) == 1 else None, "ours": list(ours)}
    settings |= {"ceilings": list(ceilings), "skipped": skipped}
    for labels, build in cases:
        measured_rows, skipped_rows, extra_figures = _measure_case(build, options, baselines, slow_reasons, figures)
        records = [row.record(**labels) for row in measured_rows]
        for record in records:
            if figures is not None:
                del record["steps_per_s"], record["host_ms"]
            record |= extra_figures[record["name"]]
        rows += records
        for row in skipped_rows:
            if not any((row.name, row.reason) == (entry["name"], entry["reason"]) for entry in skipped):
                console.print(f"{suite}: {_title(labels)}: {row.name} skipped: {row.reason}", markup=False)
            skipped.append(labels | {"name": row.name, "reason": row.reason})
        console.print(results.table(records, f"{suite}: {_title(labels)}"))
        slow_reasons |= _slow_reasons(measured_rows, labels, options, baselines)
        if options.json is not None:
            # Write after each case, so that an interruption loses only one case.
            partial_result = results.result(suite, rows=rows, settings=settings, device=options.device, environment=machine)
            results.write(options.json, partial_result)
    return finish(suite, options, rows, settings, machine, start)


def _measure_case(
    build: Build, options: Namespace, baselines: Sequence[str], slow_reasons: dict[str, str], figures: Figures | None
) -> tuple[list[Row], list[SkippedRow], dict[str, dict[str, Any]]]:
    """Measure one case. After an error of a peer the case is measured again without that row.

    Returns:
        (rows, skipped rows, further figures by name of the row).
    """
    reasons = dict(slow_reasons)
    while True:
        # The same seed for every case, so that cases do not depend on the cases before them.
        torch.manual_seed(0)
        with ExitStack() as stack:
            candidates = [
                SkippedRow(row.name, reasons[row.name]) if row.name in reasons else row
                for row in select_rows(build(stack), options.rows, () if options.step_first else baselines)
            ]
            variants = [row for row in candidates if isinstance(row, Variant)]
            if options.step_first:
                variants = [twin for row in variants for twin in with_step_first(row)]
            skipped_rows = [row for row in candidates if isinstance(row, SkippedRow)]
            del candidates
            try:
                windows = interleave(
                    variants, device=options.device, seconds=options.seconds, repeats=options.repeats, settle=settle
                )
            except PeerError as error:
                reasons[error.name] = error.reason
                windows = None
            extra_figures = {
                row.name: row.notes() | (figures(row) if figures is not None else {}) for row in variants if windows
            }
            del variants
        release(options.device)
        if windows is not None:
            if figures is not None:
                windows = {
                    name: [replace(window, steps=window.images) for window in row_windows]
                    for name, row_windows in windows.items()
                }
            baseline = next((name for name in baselines if name in windows), None)
            return summarise(windows, baseline=baseline), skipped_rows, extra_figures


def _slow_reasons(
    measured_rows: Sequence[Row], labels: dict[str, Any], options: Namespace, baselines: Sequence[str]
) -> dict[str, str]:
    """Return name: reason for each row that ``--slowest`` leaves out of all later cases."""
    if options.slowest is None:
        return {}
    seconds_per_step = {row.name: 1 / row.steps_per_s for row in measured_rows if row.name not in baselines}
    context = f"with {_title(labels)}, more than --slowest {options.slowest:g}"
    return {
        name: f"a step took {step_s:.2g} s {context}" for name, step_s in seconds_per_step.items() if step_s > options.slowest
    }


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
    """Create the result of a suite, check it, write it to the path of ``--json``, and print how long the suite took."""
    # Paths are not settings of the measurement.
    excluded = {"device", "json", "suite"}
    flags = {key: value for key, value in vars(options).items() if key not in excluded and not isinstance(value, Path)}
    seconds = perf_counter() - start
    result = results.result(
        suite,
        rows=rows,
        settings=flags | settings | {"took_s": round(seconds, 1)},
        device=options.device,
        environment=machine,
    )
    check_result(result)
    if options.json is not None:
        results.write(options.json, result)
    console.print(f"{suite}: {seconds:.0f} s" + (f", written to {options.json}" if options.json else ""))
    return result


def release(device: torch.device) -> None:
    """Free memory and workers of the last case, so that the next case starts with an empty card."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
