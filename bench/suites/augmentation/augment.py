"""Augmentation alone, on a batch of uint8 images on the device: gpuaug beside its competitors.

    python -m bench augment --json bench/results/augment.json
    python -m bench augment --cases cls,ssl --batch 64,256 --rows "DALI;gpuaug"
    python -m bench run augment_presets

Cases:

seed           RandomCrop 128, Resize 256, RandomRotation 45 degrees, GaussianBlur 7, Normalize; float32 out
cls            RandomResizedCrop 224, HorizontalFlip, ColorJitter without hue, Normalize; bfloat16 out
ssl            cls with hue, the jitter for 80 % of the images, Grayscale for 20 %, GaussianBlur 23 for 50 %
masks          cls with uint8 masks, cropped and flipped alike
randaugment    RandAugment of two ops, Normalize; bfloat16 out

torchvision's reference presets for detection and segmentation, not measured unless named in --cases; float32 out, boxes with
labels of about seven objects an image:

hflip          HorizontalFlip; boxes
lsj            ScaleJitter, RandomCrop or pad to the size of the image, HorizontalFlip; boxes
ssd            RandomPhotometricDistort, RandomZoomOut, RandomIoUCrop, HorizontalFlip, Resize to the size of the image; boxes.
               The resize is the model's otherwise
segmentation   RandomResize to half to twice the size, HorizontalFlip, RandomCrop or pad, Normalize; masks, int64 out

Rows:

torchvision loop            as published: one call of the rotation per image (seed)
torchvision v2              the whole batch in one call, with one draw for all images; boxes of all images in one tensor, from
                            which those that are gone are dropped
torchvision v2, workers     one call per image, in DataLoader workers, then a copy; boxes in a target dict for each image, from
                            which those that are gone are dropped; measured after the other rows (batch of 256; not with
                            --quick or on a CPU unless named in --rows)
Kornia                      with its defaults
Kornia, matrices skipped    with transformation_matrix_mode="skip"
Kornia compiled             torch.compile of the pipeline (seed, cls, ssl; a batch of 256; not with --quick or on a CPU
                            unless named in --rows)
fuse-augmentations, DALI    where they are installed; DALI's boxes are padded, and none is dropped
gpuaug                      gpuaug.fuse of Kornia's pipeline; boxes as in "gpuaug, padded boxes"
gpuaug, antialiased         the same with antialias=True (seed, cls, ssl), like torchvision's resizes
gpuaug, from torchvision    gpuaug.fuse of torchvision's pipeline; boxes in target dicts, collated by gpuaug.collate_ragged, and
                            gpuaug.sanitize drops those that are gone, for which the host waits
gpuaug, padded boxes        the same with boxes (B, n, 4), which "valid" says of whether they are gone (cases with boxes)
gpuaug, streamed            cls as a stage of a StreamedLoader, with the copy from page-locked memory; with boxes, target dicts
                            from the host and images on the device through a StreamedLoader, whose stages augment them and
                            drop the boxes that are gone

Kornia, and with it the rows from Kornia, has all transforms of hflip only; DALI those of all presets but ssd.

Figures of a row: images per second of a loop of calls, in interleaved windows, where with boxes a call has ended when the host
has asked each tensor of its result for shape and memory; host time of most calls, and by how much the
mean is longer, since some calls of gpuaug's draw for many to come (``ahead_ms``, on a GPU); GPU time of one call without the
host's, or the loop's time if a call waits for the GPU or works on streams of its own (``timed_by`` wall); number of kernels,
counted for a batch of 256 at the end, since the profiler slows all later launches; GPU time over that of a copy of the input's
and output's bytes; seconds to the first batch, compilation included. A row that cannot run on this machine is listed with its
reason under ``skipped``.
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
"""Columns of the table, in this order."""

_SLOW = {augmenters.COMPILED, augmenters.WORKERS}
"""Rows that take seconds to start, and are measured with one batch size."""

_OURS = (augmenters.OURS, augmenters.OURS_TORCHVISION)

_MOST_BATCHES = 64
"""Most batches that a call draws for."""

_BLOCKS, _GROWING_BLOCKS = 7, 2
"""Blocks of as many calls, and those of them in which the number of batches that a call draws for still grows."""

_LAUNCH_CALLS = 4
_FIRST_CALLS = 50


def rows_of(
    case: augmenters.Case, batch_size: int, options: Namespace, bandwidth: float | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of one case at one batch size, skipped rows with their reasons)."""
    labels = {"case": case.name, "batch_size": batch_size}
    skipped: list[dict[str, Any]] = []
    figures: dict[str, dict[str, Any]] = {}
    windows: dict[str, list[Window]] = {}
    batch = augmenters.sample(case, batch_size, options.size, options.device)

    def skip(name: str, error: Exception) -> None:
        skipped.append(labels | {"name": name, "reason": reason(error)})
        console.print(f"augment: {case.name}, B={batch_size}: {name} skipped: {skipped[-1]['reason']}", markup=False)

    names = chosen(case, batch_size, options)
    # Workers come last and alone: while they load ahead they take cores from other rows.
    together, alone = ([name for name in names if (name == augmenters.WORKERS) is own] for own in (False, True))
    with ExitStack() as stack:
        for group in (together, alone):
            ways: dict[str, AugmentCall] = {}
            for name in group:
                try:
                    start = perf_counter()
                    call = augmenters.call_of(name, case, batch, stack)
                    call()
                    synchronize(options.device)
                    figures[name] = {"first_batch_s": perf_counter() - start}
                    if name in _OURS and options.device.type == "cuda":
                        # Draws are made for more and more batches at once, up to 64.
                        for _ in range(_FIRST_CALLS):
                            call()
                        figures[name]["ahead_ms"] = ahead_ms(call, options.device)
                    figures[name] |= call_rows.call_figures(call, options.device, launches=queued_launches(name))
                    ways[name] = call
                # Any error of a peer skips its row only.
                except Exception as error:
                    skip(name, error)
            windows |= _windows(ways, options, skip)
    rows = summarise(windows, baseline=case.baseline if case.baseline in windows else None)
    made = []
    for row in rows:
        own = figures[row.name]
        record = row.record(**labels) | own
        # In images per second, the plotted figure.
        record["rounds"] = [rate * batch_size for rate in row.rounds]
        del record["steps_per_s"]
        ours = next((other for other in rows if other.name == case.ours), None)
        if ours is not None:
            record["gpuaug_over_row"] = median(a / b for a, b in zip(ours.rounds, row.rounds, strict=True))
        if bandwidth is not None and row.name not in (augmenters.STREAMED, augmenters.WORKERS):
            record |= _gpu_figures(record, case, batch, bandwidth)
        made.append(record)
    return made, skipped


def chosen(case: augmenters.Case, batch_size: int, options: Namespace) -> list[str]:
    """Names of the rows to measure for a case: all, or those in ``--rows`` and the baseline."""
    wanted = set(options.rows.split(";")) | {case.baseline} if options.rows else set(augmenters.AUGMENTERS)
    if not options.rows and (options.quick or options.device.type != "cuda"):
        wanted -= _SLOW
    if batch_size != reference(options):
        wanted -= _SLOW
    return [name for name in augmenters.row_names(case) if name in wanted]


def reference(options: Namespace) -> int:
    """The batch size of slow measurements: 256, else the largest."""
    return 256 if 256 in options.batch else max(options.batch)


def queued_launches(name: str) -> int | None:
    """Approximate number of kernels that a call launches on the current stream; ``None`` on other streams."""
    if name in (augmenters.DALI, augmenters.STREAMED, augmenters.WORKERS):
        return None
    ours = (*_OURS, augmenters.ANTIALIASED, augmenters.OURS_PADDED)
    return call_rows.FEW_LAUNCHES if name in ours else call_rows.MANY_LAUNCHES


def ahead_ms(call: AugmentCall, device: torch.device) -> float:
    """Milliseconds by which a call of gpuaug's is longer on average than most are: one call draws for many to come."""
    more = []
    for _ in range(_BLOCKS):
        taken = []
        for _ in range(_MOST_BATCHES):
            synchronize(device)
            start = perf_counter()
            call()
            taken.append(1e3 * (perf_counter() - start))
        more.append(fmean(taken) - median(taken))
    return median(more[_GROWING_BLOCKS:])


def count_launches(rows: list[dict[str, Any]], cases: Sequence[augmenters.Case], options: Namespace) -> None:
    """Add the number of kernels of one call to the rows of one batch size, without compiling any row again."""
    size = reference(options)
    for case in cases:
        batch = augmenters.sample(case, size, options.size, options.device)
        own = [row for row in rows if (row["case"], row["batch_size"]) == (case.name, size) and row["name"] not in _SLOW]
        with ExitStack() as stack:
            for row in own:
                call = augmenters.call_of(row["name"], case, batch, stack)
                # One call of gpuaug's draws for many, and may have a launch for that.
                few = queued_launches(row["name"]) == call_rows.FEW_LAUNCHES
                calls = _MOST_BATCHES if few else _LAUNCH_CALLS
                for _ in range(calls):
                    call()
                row["launches"] = len(timing.launched_kernels(call, calls)) / calls
        measurement.release(options.device)


def _windows(
    ways: dict[str, AugmentCall], options: Namespace, skip: Callable[[str, Exception], None]
) -> dict[str, list[Window]]:
    """Rounds of windows over calls that worked once. A call that fails is skipped, and the others start anew."""
    while ways:
        failed: list[tuple[str, Exception]] = []

        def steps(name: str, call: AugmentCall, failed: list[tuple[str, Exception]] = failed) -> Iterator[int]:
            while True:
                try:
                    found = call()
                    images = len(found[0] if isinstance(found, (list, tuple)) else found)
                except Exception as error:
                    failed.append((name, error))
                    raise
                yield images

        variants = [
            Variant(name, partial(steps, name, call), discard=call.queue_length if isinstance(call, QueuedCall) else 0)
            for name, call in ways.items()
        ]
        try:
            return interleave(
                variants, device=options.device, seconds=options.seconds, repeats=options.repeats, warmup=1, settle=settle
            )
        except Exception:
            if not failed:
                raise
            skip(*failed[0])
            ways = {name: call for name, call in ways.items() if name != failed[0][0]}
    return {}


def _gpu_figures(row: dict[str, Any], case: augmenters.Case, batch: augmenters.Batch, bandwidth: float) -> dict[str, Any]:
    """GPU time, or the loop's if a call cannot be timed alone, and its ratio to a copy of the input's and output's bytes."""
    size = row["batch_size"]
    found = {key: row[key] for key in ("gpu_ms", "timed_by") if key in row}
    if not found:
        found = {"gpu_ms": 1e3 * size / row["images_per_s"], "timed_by": "wall"}
    elif row["name"] in _OURS:
        found["gpu_images_per_s"] = 1e3 * size / found["gpu_ms"]
    out_pixels = size * case.out**2
    written = out_pixels * (3 * case.dtype.itemsize + (case.masks.itemsize if case.masks else 0))
    # Boxes are few bytes beside pixels.
    found["floor_bytes"] = sum(part.nbytes for part in (batch.images, batch.masks) if part is not None) + written
    found["times_a_copy"] = found["gpu_ms"] / 1e3 / (found["floor_bytes"] / bandwidth)
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("augment", __doc__, batch="32,64,128,256,512", seconds=0.15, repeats=3)
    parser.add_argument("--cases", help="comma-separated (default: all but torchvision's presets)")
    options = flags.parse(parser, argv)
    del options.workers  # nothing is loaded
    cases = _cases(options)
    machine = environment(options.device)
    start = perf_counter()
    machine["versions"] |= augmenters.installed_versions()
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
            # Every case starts from the same seed, whichever cases ran before it.
            torch.manual_seed(0)
            made, skipped = rows_of(case, batch_size, options, bandwidth)
            rows += made
            settings["skipped"] += skipped
            present = [key for key in COLUMNS[2:] if any(key in row for row in made)]
            shown = [{key: row.get(key, "") for key in present} for row in made]
            print_rows(shown, f"augment: {case.name}, batch size {batch_size}")
            measurement.release(options.device)
            if options.json is not None and rows:
                # The result so far: an interruption then loses one case only.
                partial_result = results.result(
                    "augment", rows=rows, settings=settings, device=options.device, environment=machine
                )
                results.write(options.json, partial_result)
    if options.device.type == "cuda":
        count_launches(rows, cases, options)
    return measurement.finish("augment", options, rows, settings, machine, start)


def _cases(options: Namespace) -> list[augmenters.Case]:
    """The cases of ``--cases``. Unknown names of cases and rows end the program before the measurement."""
    cases = augmenters.cases(options.size)
    known = [case.name for case in cases]
    wanted = options.cases.split(",") if options.cases else [case.name for case in cases if not case.preset]
    if not set(wanted) <= set(known):
        raise SystemExit(
            f"--cases must be among {', '.join(known)}, got {options.cases}. Leave it out to measure all but the presets."
        )
    if options.rows and not set(options.rows.split(";")) <= set(augmenters.AUGMENTERS):
        raise SystemExit(
            f"--rows must be among {'; '.join(augmenters.AUGMENTERS)}, got {options.rows}. Leave it out to measure all of them."
        )
    return [case for case in cases if case.name in wanted]
