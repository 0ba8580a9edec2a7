"""Bytes per second from DataLoader workers to the GPU, without decoding and training.

    python -m bench feeds --json bench/results/feeds.json
    python -m bench feeds --sizes 224,256 --workers 8 --batch 256 --rows "SPDL;StreamedLoader"

Samples are uint8 images and int64 labels, views of a pool in memory that all workers share, so that figures measure only the
transfer from a sample to the card. The pool is larger than CPU caches: from a cache, rows that copy little would be faster,
relative to rows that are bound by memory, than with any real data set. Rows:

DataLoader, unpinned     a ``.to(device)`` for each tensor
DataLoader, pinned       pin_memory=True and ``.to(device, non_blocking=True)``
pinned, copy stream      the usual prefetcher: the next batch is copied on a second stream, for which the loop's stream waits
SPDL, FFCV               if they are installed: as many threads as other rows have workers
StreamedLoader, plain    feed="plain" over a DataLoader with pin_memory=True
StreamedLoader           with defaults, over a DataLoader without pin_memory (feed="ring" on a CPU)
StreamedLoader, fused    the same with RandomResizedCrop 224, HorizontalFlip, ColorJitter without hue and Normalize, fused, to
                         bfloat16 and channels last; with the largest batches only
stacking alone           a ceiling: each worker stacks its batches in its own memory, and hands over nothing

Figures of a row:

gb_per_s      GB per second of a loop that only reads batches; ratio: to the row ``DataLoader, pinned`` (on a CPU to
              ``DataLoader, unpinned``)
next_ms       median time of ``next()`` in that loop, mostly waiting
cpu_ms        CPU time of the training thread per batch in that loop
host_ms       time of ``next()`` after a pause, in which the batch became ready and the core of the thread went to sleep
slot_share    share of the batches that came through a slot of the ring

Rows run one after another, and the workers of a row end before the next row starts, since the workers of all rows together
would outnumber the cores. All rows are repeated, every other time in reverse order, and ratios are taken within a repeat. A
repeat that would end after ``--limit`` seconds is left out.
"""

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.data.random_images import RepeatedRandomImages
from bench.harness import flags, measurement, timing
from bench.harness.console import console, print_rows
from bench.harness.optional_rows import MissingError, reason
from bench.peers.feeders import COPY_STREAM, FEEDERS, FUSED, PINNED, PLAIN, STACKING, STREAMED, UNPINNED, FeedCase, OpenFeeder
from gpuaug.benchkit import results
from gpuaug.benchkit.environment import allowed_cores, environment
from gpuaug.benchkit.windows import synchronize

_WARM_SECONDS, _FILL_SECONDS = 1.0, 0.3
_NEXT_CALLS, _NEXT_DISCARDED = 16, 4


def measure(name: str, case: FeedCase, options: Namespace, *, host: bool) -> dict[str, float]:
    """Open a row, measure one window, and close the row. Returns its figures. ``host``: whether to measure ``host_ms``."""
    device = options.device
    with ExitStack() as stack:
        feeder = FEEDERS[name](case, device, stack)
        next(feeder.batches)
        # Discards batches that were made before the ring had slots, or while the loop was not reading.
        _discard(feeder.batches, case.queue_length, min(_WARM_SECONDS, 2 * options.seconds))
        if feeder.stats is not None:
            # A slot is page-locked when it is first read. So let the workers fill all slots, then read them.
            time.sleep(_FILL_SECONDS)
            _discard(feeder.batches, case.queue_length, min(_WARM_SECONDS, 2 * options.seconds))
        counts_before = _batch_counts(feeder)
        next_s, seconds, cpu_seconds = _window(feeder.batches, options.seconds, device)
        window = {
            "batches_per_s": len(next_s) / seconds,
            "next_ms": 1e3 * median(next_s),
            "cpu_ms": 1e3 * cpu_seconds / len(next_s),
        }
        if counts_before is not None and (counts := _batch_counts(feeder)) is not None:
            slot_batches, other_batches = (
                count - count_before for count, count_before in zip(counts, counts_before, strict=True)
            )
            window["slot_share"] = slot_batches / max(1, slot_batches + other_batches)
        if host:
            # Twice the time of a batch, but at least 2 ms, since sleep() is imprecise below, and at most 50 ms, to save time.
            pause_s = min(max(2 * seconds / len(next_s), 0.002), 0.05)
            host_us = timing.time_next(feeder.batches, _NEXT_DISCARDED + _NEXT_CALLS, device, pause_s)
            window["host_ms"] = median(host_us[_NEXT_DISCARDED:]) / 1e3
        del feeder
    measurement.release(device)
    return window


def _discard(batches: Iterator[Any], count: int, limit_s: float) -> None:
    end = perf_counter() + limit_s
    for _ in range(count):
        next(batches)
        if perf_counter() > end:
            break


def _window(batches: Iterator[Any], seconds: float, device: torch.device) -> tuple[list[float], float, float]:
    """Read batches for ``seconds``.

    Returns:
        (seconds of each ``next``, seconds until the device had the last batch, CPU seconds of this thread).
    """
    next_s = []
    synchronize(device)
    cpu_s = time.thread_time()
    start = now = perf_counter()
    while now < start + seconds:
        batch = next(batches)
        previous = now
        now = perf_counter()
        next_s.append(now - previous)
        del batch
    cpu_s = time.thread_time() - cpu_s  # before the synchronisation, which may spin
    synchronize(device)
    return next_s, perf_counter() - start, cpu_s


def _batch_counts(feeder: OpenFeeder) -> tuple[int, int] | None:
    if feeder.stats is None:
        return None
    stats = feeder.stats()
    return stats.slot_batches, stats.other_batches


def cases(options: Namespace) -> list[FeedCase]:
    """Return a case for every combination of image size, number of workers and batch size."""
    feed_cases = []
    for size in options.sizes:
        images = RepeatedRandomImages(size)
        sample_bytes = sum(tensor.nbytes for tensor in images[0])
        for workers in options.workers:
            for batch_size in options.batch:
                # 2, the default of DataLoader, if /dev/shm has room for twice the batches.
                fits = _free_shared_bytes() > 2 * 2 * workers * batch_size * sample_bytes
                feed_cases.append(FeedCase(workers, batch_size, images, prefetch=2 if fits else 1))
    return feed_cases


def _free_shared_bytes() -> float:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return float("inf")
    return status.f_bavail * status.f_frsize


def row_names(options: Namespace) -> tuple[list[str], str]:
    """Return (names of the rows to measure, which the device can run; name of the baseline)."""
    baseline = PINNED if options.device.type == "cuda" else UNPINNED
    available = [name for name in FEEDERS if options.device.type == "cuda" or name not in (PINNED, COPY_STREAM)]
    requested = set(options.rows.split(";")) if options.rows else set(available)
    if not requested <= set(available):
        raise SystemExit(
            f"--rows must be among {'; '.join(available)}, got {options.rows}. Leave it out to measure all of them."
        )
    return [name for name in available if name in requested | {baseline}], baseline


def _labels(case: FeedCase, options: Namespace) -> dict[str, Any]:
    size = case.data.images.shape[-1]
    name = f"{case.workers} workers" + (f", {size} px" if len(options.sizes) > 1 else "")
    return {"case": name, "batch_size": case.batch_size, "size": size}


def figures(case: FeedCase, name: str, windows_by_row: dict[str, list[dict[str, float]]], baseline: str) -> dict[str, Any]:
    """Return the result's row ``name`` of a case, from the windows of all rows, one per repeat."""
    gb = case.batch_size * case.sample_bytes / 1e9
    repeats = windows_by_row[name]
    rates = [window["batches_per_s"] for window in repeats]
    row: dict[str, Any] = {"name": name, "gb_per_s": gb * median(rates), "rounds": [gb * rate for rate in rates]}
    for key in ("batches_per_s", "next_ms", "cpu_ms", "host_ms", "slot_share"):
        values = [window[key] for window in repeats if key in window]
        if values:
            row[key] = median(values)
    if baseline in windows_by_row:
        ratios = [rate / window["batches_per_s"] for rate, window in zip(rates, windows_by_row[baseline], strict=True)]
        row |= {"ratio": median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}
    return row


class _Run:
    """Measurements so far: for each case and row the figures of each repeat."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.cases = cases(options)
        self.names, self.baseline = row_names(options)
        self.windows: dict[tuple[int, str], list[dict[str, float]]] = {}
        self.skipped: dict[tuple[int, str], str] = {}

    def repeat(self, index: int) -> None:
        for number, case in enumerate(self.cases):
            for name in self.names if index % 2 == 0 else self.names[::-1]:
                # This row shows the time of next() with large batches. Other batch sizes would add no information.
                too_small = name == FUSED and case.batch_size < max(self.options.batch)
                if too_small or (number, name) in self.skipped:
                    continue
                torch.manual_seed(0)
                try:
                    window = measure(name, case, self.options, host=index == 0)
                # An error skips only its row.
                except Exception as error:
                    self._skip(number, name, error)
                else:
                    self.windows.setdefault((number, name), []).append(window)

    def _skip(self, number: int, name: str, error: Exception) -> None:
        missing = isinstance(error, MissingError)
        self.skipped |= {
            (case_number, name): reason(error) for case_number in (range(len(self.cases)) if missing else [number])
        }
        prefix = "" if missing else "{case}, B={batch_size}: ".format_map(_labels(self.cases[number], self.options))
        console.print(f"feeds: {prefix}{name} skipped: {reason(error)}", markup=False)
        measurement.release(self.options.device)

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for number, case in enumerate(self.cases):
            names = [name for name in self.names if (number, name) in self.windows and (number, name) not in self.skipped]
            windows_by_row = {name: self.windows[number, name] for name in names}
            rows += [
                _labels(case, self.options) | figures(case, name, windows_by_row, self.baseline) for name in windows_by_row
            ]
        return rows

    def reasons(self) -> list[dict[str, Any]]:
        return [
            _labels(self.cases[number], self.options) | {"name": name, "reason": reason}
            for (number, name), reason in self.skipped.items()
        ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    base_parser = flags.parser("feeds", __doc__, batch="64,256", seconds=0.5, repeats=3)
    # Unlike in other suites, these flags take several numbers.
    parser = ArgumentParser(
        prog=base_parser.prog,
        description=__doc__,
        formatter_class=base_parser.formatter_class,
        parents=[base_parser],
        conflict_handler="resolve",
    )
    parser.add_argument("--workers", type=flags.numbers, default=(), help="comma-separated (default: 4,8,14, fewer than cores)")
    parser.add_argument(
        "--size", "--sizes", dest="sizes", type=flags.numbers, default=(256,), help="comma-separated (default: 256)"
    )
    parser.add_argument("--limit", type=float, default=160, help="seconds after which no repeat ends (default: %(default)s)")
    options = flags.parse(parser, argv)
    # At least one worker, since only workers write to a ring.
    cores = allowed_cores()
    worker_counts = [workers for workers in (4, 8, 14) if workers < cores] or [max(1, cores - 1)]
    options.workers = tuple(workers for workers in options.workers if workers) or tuple(worker_counts)
    start = perf_counter()
    machine = environment(options.device)
    run = _Run(options)
    settings: dict[str, Any] = {"baseline": run.baseline, "ours": [PLAIN, STREAMED, FUSED], "ceilings": [STACKING]}
    if options.device.type == "cuda":
        settings["link_gb_per_s"] = timing.link_gb_per_s(options.device)
    rows = []
    repeat_s = 0.0
    for index in range(options.repeats):
        repeat_start = perf_counter()
        if index and repeat_start - start + repeat_s > options.limit:
            console.print(f"feeds: stopped after {index} of {options.repeats} repeats, by --limit {options.limit:g}")
            options.repeats = index
            break
        run.repeat(index)
        repeat_s = perf_counter() - repeat_start
        rows, settings["skipped"] = run.rows(), run.reasons()
        if not rows:
            raise SystemExit("--rows must name a row that can be measured here, got none. See above why each was skipped.")
        if options.json is not None:
            # Write after each repeat, so that an interruption loses only one repeat.
            partial_result = results.result("feeds", rows=rows, settings=settings, device=options.device, environment=machine)
            results.write(options.json, partial_result)
    columns = ("case", "batch_size", "name", "gb_per_s", "ratio", "batches_per_s", "next_ms", "cpu_ms", "host_ms", "slot_share")
    print_rows([{key: row.get(key, "") for key in columns} for row in rows], "feeds: to the card")
    return measurement.finish("feeds", options, rows, settings, machine, start)
