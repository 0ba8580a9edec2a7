"""Feeding the card: bytes a second from DataLoader workers to the GPU, with nothing to decode and nothing to train.

    python -m bench feeds --json bench/results/feeds.json
    python -m bench feeds --sizes 224,256 --workers 8 --batch 256 --rows "SPDL;StreamedLoader"

Samples are ready: uint8 images and int64 labels, views of a pool in memory that all workers share, so that figures measure only
the way from a sample to the card. The pool is larger than CPU caches: from a cache, rows that copy little would gain more on
rows that wait for memory than with any real data set. Rows:

DataLoader, unpinned     a ``.to(device)`` for each tensor
DataLoader, pinned       pin_memory=True and ``.to(device, non_blocking=True)``
pinned, copy stream      the usual prefetcher: the next batch is copied on a stream of its own, and the loop's waits for that
SPDL, FFCV               where they are installed: threads, as many as there are workers elsewhere
StreamedLoader, plain    feed="plain" over a DataLoader with pin_memory=True
StreamedLoader           with defaults, over a DataLoader without pin_memory (feed="ring" on a CPU)
StreamedLoader, fused    the same with RandomResizedCrop 224, HorizontalFlip, ColorJitter without hue and Normalize, fused, to
                         bfloat16 and channels last; with the largest batches only
stacking alone           a ceiling: workers stack their batches, each in memory of its own, and hand over nothing

Figures of a row: bytes per second of a loop that only reads batches, and its ratio to the row ``DataLoader, pinned`` (to
``DataLoader, unpinned`` on a CPU); the median time of a ``next()`` in that loop, mostly waiting (``next_ms``); the CPU time of
the training thread per batch in that loop (``cpu_ms``); the time of a ``next()`` after a pause in which the batch became ready
and the thread's core went to sleep (``host_ms``); and the share of batches that came through a slot of the ring.

Rows run one after another, each with workers of its own, which end before the next row starts: all rows' workers together
would be more than the cores. All rows are repeated, every other time in reverse order, and ratios are taken within a repeat. A
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
    """The figures of one window of one row, which is opened before and closed after it."""
    device = options.device
    with ExitStack() as stack:
        opened = FEEDERS[name](case, device, stack)
        next(opened.batches)
        # Discards batches that were made before the ring had slots, or while nobody read.
        _take(opened.batches, case.queued, min(_WARM_SECONDS, 2 * options.seconds))
        if opened.stats is not None:
            # A slot is page-locked when it is first read: let the workers fill all slots, then read them.
            time.sleep(_FILL_SECONDS)
            _take(opened.batches, case.queued, min(_WARM_SECONDS, 2 * options.seconds))
        before = _counted(opened)
        taken, seconds, cpu_seconds = _window(opened.batches, options.seconds, device)
        found = {
            "batches_per_s": len(taken) / seconds,
            "next_ms": 1e3 * median(taken),
            "cpu_ms": 1e3 * cpu_seconds / len(taken),
        }
        if before is not None and (after := _counted(opened)) is not None:
            slots, others = (now - then for now, then in zip(after, before, strict=True))
            found["slot_share"] = slots / max(1, slots + others)
        if host:
            # Twice the time of a batch, within limits: sleeping is imprecise below them, and slow above.
            pause_s = min(max(2 * seconds / len(taken), 0.002), 0.05)
            calls = timing.time_next(opened.batches, _NEXT_DISCARDED + _NEXT_CALLS, device, pause_s)
            found["host_ms"] = median(calls[_NEXT_DISCARDED:]) / 1e3
        del opened
    measurement.release(device)
    return found


def _take(batches: Iterator[Any], count: int, most_s: float) -> None:
    until = perf_counter() + most_s
    for _ in range(count):
        next(batches)
        if perf_counter() > until:
            break


def _window(batches: Iterator[Any], seconds: float, device: torch.device) -> tuple[list[float], float, float]:
    """(seconds of each ``next``, seconds until the device had the last batch, CPU seconds of this thread)."""
    taken = []
    synchronize(device)
    computed = time.thread_time()
    start = now = perf_counter()
    while now < start + seconds:
        batch = next(batches)
        then = now
        now = perf_counter()
        taken.append(now - then)
        del batch
    computed = time.thread_time() - computed  # before the synchronisation, which may spin
    synchronize(device)
    return taken, perf_counter() - start, computed


def _counted(opened: OpenFeeder) -> tuple[int, int] | None:
    if opened.stats is None:
        return None
    stats = opened.stats()
    return stats.slot_batches, stats.other_batches


def cases(options: Namespace) -> list[FeedCase]:
    """Every combination of image size, number of workers and batch size."""
    made = []
    for size in options.sizes:
        images = RepeatedRandomImages(size)
        sample_bytes = sum(part.nbytes for part in images[0])
        for workers in options.workers:
            for batch_size in options.batch:
                # DataLoader's own default, where /dev/shm has room for as much again.
                room = _shared_bytes() > 2 * 2 * workers * batch_size * sample_bytes
                made.append(FeedCase(workers, batch_size, images, prefetch=2 if room else 1))
    return made


def _shared_bytes() -> float:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return float("inf")
    return found.f_bavail * found.f_frsize


def chosen(options: Namespace) -> tuple[list[str], str]:
    """(names of the rows that can run on the device, in order; name of the baseline)."""
    baseline = PINNED if options.device.type == "cuda" else UNPINNED
    known = [name for name in FEEDERS if options.device.type == "cuda" or name not in (PINNED, COPY_STREAM)]
    wanted = set(options.rows.split(";")) if options.rows else set(known)
    if not wanted <= set(known):
        raise SystemExit(f"--rows must be among {'; '.join(known)}, got {options.rows}. Leave it out to measure all of them.")
    return [name for name in known if name in wanted | {baseline}], baseline


def _labels(case: FeedCase, options: Namespace) -> dict[str, Any]:
    size = case.data.images.shape[-1]
    name = f"{case.workers} workers" + (f", {size} px" if len(options.sizes) > 1 else "")
    return {"case": name, "batch_size": case.batch_size, "size": size}


def figures(case: FeedCase, name: str, found: dict[str, list[dict[str, float]]], baseline: str) -> dict[str, Any]:
    """The row ``name`` of a case, from the repeats of all rows."""
    gb = case.batch_size * case.sample_bytes / 1e9
    repeats = found[name]
    rates = [once["batches_per_s"] for once in repeats]
    row: dict[str, Any] = {"name": name, "gb_per_s": gb * median(rates), "rounds": [gb * rate for rate in rates]}
    for key in ("batches_per_s", "next_ms", "cpu_ms", "host_ms", "slot_share"):
        values = [once[key] for once in repeats if key in once]
        if values:
            row[key] = median(values)
    if baseline in found:
        ratios = [rate / once["batches_per_s"] for rate, once in zip(rates, found[baseline], strict=True)]
        row |= {"ratio": median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}
    return row


class _Run:
    """The measurements so far: for each case and row a dict per repeat."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.cases = cases(options)
        self.names, self.baseline = chosen(options)
        self.found: dict[tuple[int, str], list[dict[str, float]]] = {}
        self.skipped: dict[tuple[int, str], str] = {}

    def repeat(self, index: int) -> None:
        for number, case in enumerate(self.cases):
            for name in self.names if index % 2 == 0 else self.names[::-1]:
                # This row is for the time of a next() with large batches; other sizes would only take time.
                too_small = name == FUSED and case.batch_size < max(self.options.batch)
                if too_small or (number, name) in self.skipped:
                    continue
                torch.manual_seed(0)
                try:
                    once = measure(name, case, self.options, host=index == 0)
                # Any error of a row skips that row only.
                except Exception as error:
                    self._skip(number, name, error)
                else:
                    self.found.setdefault((number, name), []).append(once)

    def _skip(self, number: int, name: str, error: Exception) -> None:
        missing = isinstance(error, MissingError)
        self.skipped |= {(other, name): reason(error) for other in (range(len(self.cases)) if missing else [number])}
        where = "" if missing else "{case}, B={batch_size}: ".format_map(_labels(self.cases[number], self.options))
        console.print(f"feeds: {where}{name} skipped: {reason(error)}", markup=False)
        measurement.release(self.options.device)

    def rows(self) -> list[dict[str, Any]]:
        made = []
        for number, case in enumerate(self.cases):
            kept = [name for name in self.names if (number, name) in self.found and (number, name) not in self.skipped]
            found = {name: self.found[number, name] for name in kept}
            made += [_labels(case, self.options) | figures(case, name, found, self.baseline) for name in found]
        return made

    def reasons(self) -> list[dict[str, Any]]:
        return [
            _labels(self.cases[number], self.options) | {"name": name, "reason": reason}
            for (number, name), reason in self.skipped.items()
        ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    usual = flags.parser("feeds", __doc__, batch="64,256", seconds=0.5, repeats=3)
    # Several numbers, where the other suites take one.
    parser = ArgumentParser(
        prog=usual.prog, description=__doc__, formatter_class=usual.formatter_class, parents=[usual], conflict_handler="resolve"
    )
    parser.add_argument("--workers", type=flags.numbers, default=(), help="comma-separated (default: 4,8,14, fewer than cores)")
    parser.add_argument(
        "--size", "--sizes", dest="sizes", type=flags.numbers, default=(256,), help="comma-separated (default: 256)"
    )
    parser.add_argument("--limit", type=float, default=160, help="seconds after which no repeat ends (default: %(default)s)")
    options = flags.read(parser, argv)
    # At least one worker: only workers have a ring.
    cores = allowed_cores()
    most = [workers for workers in (4, 8, 14) if workers < cores] or [max(1, cores - 1)]
    options.workers = tuple(workers for workers in options.workers if workers) or tuple(most)
    start = perf_counter()
    found_environment = environment(options.device)
    run = _Run(options)
    settings: dict[str, Any] = {"baseline": run.baseline, "ours": [PLAIN, STREAMED, FUSED], "ceilings": [STACKING]}
    if options.device.type == "cuda":
        settings["link_gb_per_s"] = timing.link_gb_per_s(options.device)
    rows = []
    last_s = 0.0
    for index in range(options.repeats):
        began = perf_counter()
        if index and began - start + last_s > options.limit:
            console.print(f"feeds: stopped after {index} of {options.repeats} repeats, by --limit {options.limit:g}")
            options.repeats = index
            break
        run.repeat(index)
        last_s = perf_counter() - began
        rows, settings["skipped"] = run.rows(), run.reasons()
        if not rows:
            raise SystemExit("--rows must name a way that can be measured here, got none. See above why each was skipped.")
        if options.json is not None:
            # The result so far: an interruption then loses later repeats only.
            so_far = results.result("feeds", rows=rows, settings=settings, device=options.device, environment=found_environment)
            results.write(options.json, so_far)
    shown = ("case", "batch_size", "name", "gb_per_s", "ratio", "batches_per_s", "next_ms", "cpu_ms", "host_ms", "slot_share")
    print_rows([{key: row.get(key, "") for key in shown} for row in rows], "feeds: to the card")
    return measurement.finish("feeds", options, rows, settings, found_environment, start)
