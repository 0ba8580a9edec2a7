"""Augmentation alone, on a batch of uint8 images on the device: gpuaug and other libraries.

    python -m bench augment --json bench/results/augment.json
    python -m bench augment --cases cls,ssl --batch 64,256 --rows "DALI;gpuaug"
    python -m bench run augment_presets

Cases:

seed           RandomCrop 128, Resize 256, RandomRotation 45 degrees, GaussianBlur 7, Normalize; float32 out
cls            RandomResizedCrop 224, RandomHorizontalFlip, ColorJitter without hue, Normalize; bfloat16 out
ssl            cls with hue, the jitter with probability 0.8, Grayscale 0.2, GaussianBlur of 23 x 23 pixels 0.5
masks          cls with uint8 masks, with the same crop and flip
randaugment    RandAugment of two ops, Normalize; bfloat16 out

torchvision's reference presets for detection and segmentation, measured only if --cases has them; float32 out, boxes with
labels of about seven objects per image:

hflip          RandomHorizontalFlip; boxes
lsj            ScaleJitter, RandomCrop or pad to the size of the image, RandomHorizontalFlip; boxes
ssd            RandomPhotometricDistort, RandomZoomOut, RandomIoUCrop, RandomHorizontalFlip; boxes; and Resize to the size of
               the image, which in the reference is part of the model
segmentation   RandomResize to half to twice the size, RandomHorizontalFlip, RandomCrop or pad, Normalize; masks, int64 out

Rows:

torchvision loop            as published: one call of the rotation per image (seed)
torchvision v2              the whole batch in one call, with one draw for all images; boxes of all images in one tensor, from
                            which invalid boxes are removed
torchvision v2, workers     one call per image, in DataLoader workers, then a copy; boxes in one target dict per image, from
                            which invalid boxes are removed; measured after the other rows (batch of 256; with --quick or
                            on a CPU only if --rows has it)
Kornia                      with its defaults
Kornia, matrices skipped    with transformation_matrix_mode="skip"
Kornia compiled             torch.compile of the pipeline (seed, cls, ssl; a batch of 256; with --quick or on a CPU only if
                            --rows has it)
fuse-augmentations, DALI    if they are installed; DALI's boxes are padded, and none is removed
gpuaug                      gpuaug.fuse of Kornia's pipeline; boxes as in "gpuaug, padded boxes"
gpuaug, antialiased         the same with antialias=True (seed, cls, ssl), like torchvision's resizes
gpuaug, from torchvision    gpuaug.fuse of torchvision's pipeline; boxes in target dicts, collated by gpuaug.collate_ragged;
                            gpuaug.sanitize removes invalid boxes, for which the host waits
gpuaug, padded boxes        the same with boxes (B, n, 4), and "valid" marks the boxes that are valid (cases with boxes)
gpuaug, streamed            cls as a stage of a StreamedLoader, with the copy from page-locked memory; with boxes, target dicts
                            on the host and images on the device through a StreamedLoader, whose stages augment them and
                            remove invalid boxes
gpuaug, hand-over           the same loader, with a stage that returns the target dicts as they are: the least host time of a
                            loader of target dicts (cases with boxes)

Rows with Kornia's modules exist only for the preset hflip, because Kornia lacks transforms of the other presets. DALI lacks
transforms of ssd only.

Figures of a row:

images_per_s     images per second of a loop of calls, in interleaved windows; with boxes, a call includes reading shape and
                 address of each tensor in its result
host_ms          median host time of a call; ahead_ms: mean minus median, since some calls of gpuaug draw for many later calls
                 (on a GPU)
gpu_ms           GPU time of one call without host time (``timed_by`` events), or the time of the loop if a call waits for the
                 GPU or works on other streams (``timed_by`` wall)
launches         number of kernels of a call, counted at the end, since the profiler slows all later launches
times_a_copy     GPU time over the time of a copy of the bytes of input and output
first_batch_s    seconds to the first batch, including compilation

A row that cannot run on this machine is listed with its reason under ``skipped``.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch

from bench.harness import call_rows, flags, measurement, timing
from bench.harness.call_rows import AugmentCall, QueuedCall
from bench.harness.console import console, print_rows
from bench.harness.optional_rows import reason
from bench.harness.processes import settle
from bench.peers import augmenters
from gpuaug.benchkit import results
from gpuaug.benchkit.environment import environment
from gpuaug.benchkit.windows import Variant, Window, interleave, summarise, synchronize

COLUMNS = (
    "case",
    "batch_size",
    "name",
    "images_per_s",
    "gpuaug_over_row",
    "host_ms",
    "ahead_ms",
    "gpu_ms",
    "timed_by",
    "gpu_images_per_s",
    "launches",
    "times_a_copy",
    "first_batch_s",
)
"""Columns of the table, in order."""

_SLOW_ROWS = {augmenters.COMPILED, augmenters.WORKERS}
"""Rows that take seconds to start, and are measured only with one batch size."""

_OURS = (augmenters.OURS, augmenters.OURS_TORCHVISION)

_MAX_BATCHES = 64
"""Largest number of batches for which a call of gpuaug draws."""

_BLOCKS, _GROWING_BLOCKS = 7, 2
"""Number of measured blocks of ``_MAX_BATCHES`` calls, and of the first blocks, in which calls still draw for fewer batches."""

_LAUNCH_CALLS = 4
_FIRST_CALLS = 50


def rows_of(
    case: augmenters.Case, batch_size: int, options: Namespace, bandwidth: float | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure one case at one batch size. Returns (rows, skipped rows with their reasons)."""
    labels = {"case": case.name, "batch_size": batch_size}
    skipped: list[dict[str, Any]] = []
    figures: dict[str, dict[str, Any]] = {}
    windows: dict[str, list[Window]] = {}
    batch = augmenters.random_inputs(case, batch_size, options.size, options.device)

    def skip(name: str, error: Exception) -> None:
        skipped.append(labels | {"name": name, "reason": reason(error)})
        console.print(f"augment: {case.name}, B={batch_size}: {name} skipped: {skipped[-1]['reason']}", markup=False)

    names = requested_rows(case, batch_size, options)
    # The row with workers is measured last and alone, because workers that load ahead take cores from other rows.
    interleaved_names, worker_names = (
        [name for name in names if (name == augmenters.WORKERS) is with_workers] for with_workers in (False, True)
    )
    with ExitStack() as stack:
        for group in (interleaved_names, worker_names):
            calls: dict[str, AugmentCall] = {}
            for name in group:
                try:
                    start = perf_counter()
                    call = augmenters.create_call(name, case, batch, stack)
                    call()
                    synchronize(options.device)
                    figures[name] = {"first_batch_s": perf_counter() - start}
                    if name in _OURS and options.device.type == "cuda":
                        # Draws are made for a growing number of batches at once, up to 64.
                        for _ in range(_FIRST_CALLS):
                            call()
                        figures[name]["ahead_ms"] = ahead_ms(call, options.device)
                    figures[name] |= call_rows.call_figures(call, options.device, launches=queued_launches(name))
                    calls[name] = call
                # An error skips only its row.
                except Exception as error:
                    skip(name, error)
            windows |= _windows(calls, options, skip)
    rows = summarise(windows, baseline=case.baseline if case.baseline in windows else None)
    records = []
    for row in rows:
        record = row.record(**labels) | figures[row.name]
        # Images per second, since that is the plotted figure.
        record["rounds"] = [rate * batch_size for rate in row.rounds]
        del record["steps_per_s"]
        ours = next((candidate for candidate in rows if candidate.name == case.ours), None)
        if ours is not None:
            record["gpuaug_over_row"] = median(a / b for a, b in zip(ours.rounds, row.rounds, strict=True))
        if bandwidth is not None and row.name not in (augmenters.STREAMED, augmenters.HAND_OVER, augmenters.WORKERS):
            record |= _gpu_figures(record, case, batch, bandwidth)
        records.append(record)
    return records, skipped


def requested_rows(case: augmenters.Case, batch_size: int, options: Namespace) -> list[str]:
    """Return the names of the rows to measure for a case: all, or the rows in ``--rows`` and the baseline."""
    requested = set(options.rows.split(";")) | {case.baseline} if options.rows else set(augmenters.AUGMENTERS)
    if not options.rows and (options.quick or options.device.type != "cuda"):
        requested -= _SLOW_ROWS
    if batch_size != reference_batch_size(options):
        requested -= _SLOW_ROWS
    return [name for name in augmenters.row_names(case) if name in requested]


def reference_batch_size(options: Namespace) -> int:
    """Return the batch size of slow measurements: 256 if it is in ``--batch``, else the largest."""
    return 256 if 256 in options.batch else max(options.batch)


def queued_launches(name: str) -> int | None:
    """Return the approximate number of kernels that a call launches on the current stream. ``None``: it uses other streams."""
    if name in (augmenters.DALI, augmenters.STREAMED, augmenters.HAND_OVER, augmenters.WORKERS):
        return None
    ours = (*_OURS, augmenters.ANTIALIASED, augmenters.OURS_PADDED)
    return call_rows.FEW_LAUNCHES if name in ours else call_rows.MANY_LAUNCHES


def ahead_ms(call: AugmentCall, device: torch.device) -> float:
    """Return mean minus median of the times of calls of gpuaug in milliseconds, since some calls draw for many later calls."""
    differences_ms = []
    for _ in range(_BLOCKS):
        times_ms = []
        for _ in range(_MAX_BATCHES):
            synchronize(device)
            start = perf_counter()
            call()
            times_ms.append(1e3 * (perf_counter() - start))
        differences_ms.append(fmean(times_ms) - median(times_ms))
    return median(differences_ms[_GROWING_BLOCKS:])


def count_launches(rows: list[dict[str, Any]], cases: Sequence[augmenters.Case], options: Namespace) -> None:
    """Add the number of kernels of one call to the rows of the reference batch size, except for slow rows."""
    size = reference_batch_size(options)
    for case in cases:
        batch = augmenters.random_inputs(case, size, options.size, options.device)
        case_rows = [
            row for row in rows if (row["case"], row["batch_size"]) == (case.name, size) and row["name"] not in _SLOW_ROWS
        ]
        with ExitStack() as stack:
            for row in case_rows:
                call = augmenters.create_call(row["name"], case, batch, stack)
                # Some calls of gpuaug draw for many calls, which may take a launch.
                draws_ahead = queued_launches(row["name"]) == call_rows.FEW_LAUNCHES
                calls = _MAX_BATCHES if draws_ahead else _LAUNCH_CALLS
                for _ in range(calls):
                    call()
                row["launches"] = len(timing.launched_kernels(call, calls)) / calls
        measurement.release(options.device)


def _windows(
    calls: dict[str, AugmentCall], options: Namespace, skip: Callable[[str, Exception], None]
) -> dict[str, list[Window]]:
    """Measure rounds of windows of calls. If a call raises, it is skipped, and the measurement of the others is repeated."""
    while calls:
        failed: list[tuple[str, Exception]] = []

        def steps(name: str, call: AugmentCall, failed: list[tuple[str, Exception]] = failed) -> Iterator[int]:
            while True:
                try:
                    outputs = call()
                    images = len(outputs[0] if isinstance(outputs, (list, tuple)) else outputs)
                except Exception as error:
                    failed.append((name, error))
                    raise
                yield images

        variants = [
            Variant(name, partial(steps, name, call), discard=call.queue_length if isinstance(call, QueuedCall) else 0)
            for name, call in calls.items()
        ]
        try:
            return interleave(
                variants, device=options.device, seconds=options.seconds, repeats=options.repeats, warmup=1, settle=settle
            )
        except Exception:
            if not failed:
                raise
            skip(*failed[0])
            calls = {name: call for name, call in calls.items() if name != failed[0][0]}
    return {}


def _gpu_figures(row: dict[str, Any], case: augmenters.Case, batch: augmenters.Batch, bandwidth: float) -> dict[str, Any]:
    """Return the GPU time, or the loop's time if a call cannot be timed alone, and the ratio to a copy of the same bytes."""
    size = row["batch_size"]
    figures = {key: row[key] for key in ("gpu_ms", "timed_by") if key in row}
    if not figures:
        figures = {"gpu_ms": 1e3 * size / row["images_per_s"], "timed_by": "wall"}
    elif row["name"] in _OURS:
        figures["gpu_images_per_s"] = 1e3 * size / figures["gpu_ms"]
    out_pixels = size * case.out**2
    written_bytes = out_pixels * (3 * case.dtype.itemsize + (case.masks.itemsize if case.masks else 0))
    # The bytes of boxes are negligible.
    figures["floor_bytes"] = sum(tensor.nbytes for tensor in (batch.images, batch.masks) if tensor is not None) + written_bytes
    figures["times_a_copy"] = figures["gpu_ms"] / 1e3 / (figures["floor_bytes"] / bandwidth)
    return figures


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("augment", __doc__, batch="32,64,128,256,512", seconds=0.15, repeats=3)
    parser.add_argument("--cases", help="comma-separated (default: all but torchvision's presets)")
    options = flags.parse(parser, argv)
    del options.workers  # unused
    cases = _cases(options)
    machine = environment(options.device)
    start = perf_counter()
    machine["versions"] |= augmenters.peer_versions()
    bandwidth = timing.copy_bandwidth(options.device) if options.device.type == "cuda" else None
    baselines = {case.baseline for case in cases}
    settings: dict[str, Any] = {
        "baseline": baselines.pop() if len(baselines) == 1 else None,
        "ours": [*_OURS, augmenters.ANTIALIASED, augmenters.OURS_PADDED, augmenters.STREAMED],
        "ceilings": [],
        "columns": COLUMNS,
        "skipped": [],
        "copy_gb_per_s": bandwidth and bandwidth / 1e9,
    }
    rows: list[dict[str, Any]] = []
    for batch_size in options.batch:
        for case in cases:
            # The same seed for every case, so that cases do not depend on the cases before them.
            torch.manual_seed(0)
            case_rows, skipped = rows_of(case, batch_size, options, bandwidth)
            rows += case_rows
            settings["skipped"] += skipped
            columns = [key for key in COLUMNS[2:] if any(key in row for row in case_rows)]
            table_rows = [{key: row.get(key, "") for key in columns} for row in case_rows]
            print_rows(table_rows, f"augment: {case.name}, batch size {batch_size}")
            measurement.release(options.device)
            if options.json is not None and rows:
                # Write after each case, so that an interruption loses only one case.
                partial_result = results.result(
                    "augment", rows=rows, settings=settings, device=options.device, environment=machine
                )
                results.write(options.json, partial_result)
    if options.device.type == "cuda":
        count_launches(rows, cases, options)
    return measurement.finish("augment", options, rows, settings, machine, start)


def _cases(options: Namespace) -> list[augmenters.Case]:
    """Return the cases of ``--cases``. Unknown names in ``--cases`` or ``--rows`` end the program before the measurement."""
    cases = augmenters.cases(options.size)
    available = [case.name for case in cases]
    requested = options.cases.split(",") if options.cases else [case.name for case in cases if not case.preset]
    if not set(requested) <= set(available):
        raise SystemExit(
            f"--cases must be among {', '.join(available)}, got {options.cases}. Leave it out to measure all but the presets."
        )
    if options.rows and not set(options.rows.split(";")) <= set(augmenters.AUGMENTERS):
        raise SystemExit(
            f"--rows must be among {'; '.join(augmenters.AUGMENTERS)}, got {options.rows}. Leave it out to measure all of them."
        )
    return [case for case in cases if case.name in requested]
