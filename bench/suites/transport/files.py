"""From encoded files to batches on the card, and into a training step: gpuaug, DALI and other loaders.

    python -m bench run files
    python -m bench files --cases small --cores 16,4 --rows "DALI;gpuaug" --rate 20000
    python -m bench files --data DIR           an ImageFolder of your own in place of the small files
    python -m bench files --cases web,web/resnet50,plain/no-engines,plain/cpu --photographs DIR

Files are read from folders in the page cache. ``bench.data.encoded_images`` and ``bench.data.web_images`` write them, the
latter from photographs of installed packages, or from a folder of ``python -m bench photographs``. Cases:

small, camera, mix,   loaders alone: RandomResizedCrop 224, antialiased, RandomHorizontalFlip, ColorJitter without hue and
plain, web            Normalize, to half precision and channels last; camera has an eighth of the batch
decode                decoders alone, on files of small in memory
resnet50, resnet18    small files into a training step; any other model of torchvision by its name
no-engines            loaders alone, as on a card without JPEG engines: DALI's decoders on "mixed" with ``hw_decoder_load=0``,
                      gpuaug's with ``backend="hybrid"``
cpu                   loaders alone, all decoders on the CPU: DALI with its best settings and with whole images, and gpuaug
raw                   images that were decoded and resized beforehand, from the page cache, in gigabytes per second

web/decode, web/resnet50, plain/no-engines, plain/cpu and so on: the same loops with files of that set. Rows of loaders:

torchvision, workers    DataLoader workers decode by torchvision and augment by v2, then a copy
workers decode, fuse    DataLoader workers decode by torchvision into ``collate_ragged``, gpuaug.fuse does the rest
DALI                    fn.readers.file, decoders on "mixed"; float16, since it has no bfloat16
DALI, CPU               the same with decoders on the CPU
SPDL, fuse              threads decode by SPDL to 256 pixels, gpuaug.fuse does the rest
torchcodec, fuse        DataLoader workers read files, torchcodec decodes them on the card, then a resize of each image to 256
                        pixels; gpuaug.fuse does the rest
gpuaug                  gpuaug's read_encoded, collate_encoded, DecodeStage and fuse
gpuaug, engines / CPU   the same with that backend
gpuaug, min_side        the same with ``min_side``, for camera only
engines alone           nvjpegDecodeBatched on batches in memory, repeatedly (a ceiling)

Each row is measured with its best settings: number of workers, or of DALI's threads with ``hw_decoder_load``; then crops in the
decoder or after it; then the number of batches ahead. They are searched in short windows, and recorded in the row. Cases with a
training step try the three best settings of the loader alone. They have two more rows, both ceilings: "step alone" (batches on
the card) and "step, engines beside" (the same while as many files are decoded and dropped).

Figures of a row: images per second; ``ratio`` to DALI and ``of_ceiling`` to the first ceiling, both within a repeat;
``cpu_ms_per_image``, CPU time of this process, its threads and its workers; and ``cores_busy``, CPU time over elapsed time.
``--rate`` limits every row to a number of images per second, to show the CPU time at that rate. Rows are measured one after
another, in each repeat again; a row is opened before its window and closed after it. The result also has the rates of all
settings that were tried, and for the files of each case quantiles of sides and bytes, a hash and, for plain and web, the seed
and the number of crops.

``--cores 16,4`` measures loaders with each number of cores, each in a process that never had more; other cases are measured
with the first number only. The result is written after each row. ``--keep`` adds rows to an existing result; each row has its
commit and its GPU.
"""

import json
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.harness import flags, measurement, settings_search
from bench.harness.console import console, print_rows
from bench.harness.optional_rows import MissingError, reason
from bench.harness.processes import cpu_seconds, on_cores
from bench.harness.settings_search import Settings
from bench.peers import decoders, file_cases, file_loaders
from bench.peers.file_cases import Case
from bench.peers.file_loaders import LoaderSpec
from gpuaug.benchkit import results
from gpuaug.benchkit.environment import allowed_cores, environment
from gpuaug.benchkit.windows import synchronize

OURS = [file_loaders.OURS, file_loaders.OURS_ENGINES, file_loaders.OURS_CPU, file_loaders.OURS_MIN_SIDE, file_loaders.MAPPED]
COLUMNS = (
    *("case", "name", "images_per_s", "ratio", "of_ceiling"),
    *("cpu_ms_per_image", "cores_busy", "gb_per_s", "chosen"),
)

_WARM_BATCHES, _WARM_SECONDS, _WARM_STEP_SECONDS = 20, 1.0, 4.0
_OPENED_SECONDS = 2.0  # time to open and close a row, for the estimate of the time of a case
_STEP_CANDIDATES = 3


def measure(loader: LoaderSpec, case: Case, settings: Settings, seconds: float, rate: float | None = None) -> dict[str, float]:
    """Open a row, measure one window, and close the row. Returns images per second and CPU times."""
    device, step = case.files.device, case.step
    with ExitStack() as stack:
        batches = loader.open(case.files, stack, **settings)
        step(*next(batches))
        # Discards batches that became ready while kernels were compiled for the first batch, which takes longest with a
        # training step, and batches for which buffers grow because they are larger than all before.
        warm_batches = file_loaders.queue_length(settings)
        warm_batches = 4 * warm_batches if case.trains else warm_batches + _WARM_BATCHES
        warm_end = perf_counter() + _warm_seconds(case, seconds)
        for _ in range(warm_batches):
            step(*next(batches))
            if perf_counter() > warm_end:
                break
        synchronize(device)
        images = 0
        cpu_s = cpu_seconds()
        start = perf_counter()
        now = start
        while now < start + seconds:
            inputs, labels = next(batches)
            step(inputs, labels)
            images += len(labels)
            del inputs
            now = perf_counter()
            if rate and now < (due_time := start + images / rate):
                time.sleep(due_time - now)
                now = perf_counter()
        cpu_s = cpu_seconds() - cpu_s  # before the synchronisation, which may spin
        synchronize(device)
        elapsed_s = perf_counter() - start
        del batches
    measurement.release(device)
    return {"images_per_s": images / elapsed_s, "cpu_ms_per_image": 1e3 * cpu_s / images, "cores_busy": cpu_s / (now - start)}


def _warm_seconds(case: Case, seconds: float) -> float:
    """Return the maximum time in seconds from the first batch to the start of a window of length ``seconds``."""
    return min(_WARM_STEP_SECONDS if case.trains else _WARM_SECONDS, 4 * seconds)


def record(case: Case, name: str, windows_by_row: dict[str, list[dict[str, float]]], settings: Settings) -> dict[str, Any]:
    """Return the result's row ``name``, from the windows of all rows of its case, one per repeat."""
    windows = windows_by_row[name]
    rates = [window["images_per_s"] for window in windows]
    row: dict[str, Any] = {
        **case.labels,
        "name": name,
        "images_per_s": median(rates),
        "rounds": rates,
        **{key: median(window[key] for window in windows) for key in ("cpu_ms_per_image", "cores_busy")},
    }
    if settings:
        row["chosen"] = _describe(settings)
    if name == file_loaders.MAPPED:
        row["gb_per_s"] = row["images_per_s"] * case.files.corpus.mean_bytes / 1e9
    for key, reference in (("ratio", file_loaders.DALI), ("of_ceiling", case.ceiling)):
        if reference in windows_by_row and (key == "ratio" or reference != name):
            ratios = [rate / window["images_per_s"] for rate, window in zip(rates, windows_by_row[reference], strict=False)]
            row[key] = median(ratios)
            if key == "ratio":
                row |= {"ratio_low": min(ratios), "ratio_high": max(ratios)}
    return row


def _describe(settings: Settings) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


class _Run:
    """Measurements so far: rows, skipped rows, and the settings of each row from best to worst."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.environment = environment(options.device)
        self.start = perf_counter()
        self.rows: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {"skipped": [], "files": {}, "tried": {}}
        if options.keep and options.json is not None and options.json.exists():
            previous = json.loads(options.json.read_text(encoding="utf-8"))
            self.rows = previous["rows"]
            self.settings |= {key: previous["settings"][key] for key in self.settings if key in previous["settings"]}
        self.settings |= {
            "versions": file_loaders.versions(),
            "baseline": file_loaders.DALI,
            "ours": OURS,
            "ceilings": [decoders.ENGINES, file_cases.STEP_ALONE, file_cases.STEP_BESIDE],
        }
        self.ranked: dict[tuple[str, str], list[Settings]] = {}

    def measure_case(self, case: Case) -> None:
        """Measure all rows of a case, once per repeat."""
        requested = self.options.rows.split(";") if self.options.rows else [""]
        names = [
            name for name in case.loaders if any(text == name if text in case.loaders else text in name for text in requested)
        ]
        corpus, labels = case.files.corpus, case.labels
        self.settings["files"][case.title] = corpus.facts
        self.settings["tried"][case.title] = {}
        facts = "; ".join(f"{key} {value}" for key, value in corpus.facts.items())
        console.print(f"files: {case.title}: about {self._estimate_s(case, names):.0f} s; {facts}", markup=False)
        self.settings["skipped"] = [row for row in self.settings["skipped"] if not labels.items() <= row.items()]
        other_rows = [row for row in self.rows if not labels.items() <= row.items()]
        windows_by_row: dict[str, list[dict[str, float]]] = {}
        best_settings: dict[str, Settings] = {}
        for repeat in range(self.options.repeats):
            for name in names if repeat % 2 == 0 else names[::-1]:
                if repeat and name not in windows_by_row:
                    continue  # skipped in an earlier repeat
                torch.manual_seed(0)
                try:
                    if name not in best_settings:
                        best_settings[name] = self._best(name, case)
                    window = measure(case.loaders[name], case, best_settings[name], self.options.seconds, self.options.rate)
                # An error skips only its row.
                except Exception as error:
                    windows_by_row.pop(name, None)
                    self._skip(case, name, reason(error))
                    continue
                windows_by_row.setdefault(name, []).append(window)
                message = ", ".join(filter(None, [f"{window['images_per_s']:,.0f} images/s", _describe(best_settings[name])]))
                console.print(f"files: {case.title}: {name}: {message}", markup=False)
                self.rows = other_rows + self._records(case, names, windows_by_row, best_settings)
                self._write()
        self.rows = other_rows + self._records(case, names, windows_by_row, best_settings)

    def _records(
        self, case: Case, names: list[str], windows_by_row: dict[str, Any], best_settings: dict[str, Settings]
    ) -> list[dict[str, Any]]:
        # Each row has its commit and GPU, because with --keep the rows of a file come from several runs.
        gpu = self.environment["gpu"]
        origin = {"commit": self.environment["commit"]} | ({"gpu": gpu["name"]} if gpu else {})
        return [record(case, name, windows_by_row, best_settings[name]) | origin for name in names if name in windows_by_row]

    def _best(self, name: str, case: Case) -> Settings:
        loader = case.loaders[name]
        if loader.needs_gpu and self.options.device.type != "cuda":
            raise MissingError("needs a GPU")
        axes = self._axes(name, case)
        rate_by_settings: dict[str, float] = {}

        def rate(settings: Settings) -> float:
            try:
                images_per_s = measure(loader, case, settings, self.options.search)["images_per_s"]
            finally:
                measurement.release(self.options.device)
            rate_by_settings[_describe(settings)] = images_per_s
            return images_per_s

        ranked = settings_search.rank_settings(axes, rate)
        if rate_by_settings:
            self.settings["tried"][case.title][name] = rate_by_settings
        if not case.trains:
            self.ranked[case.settings_key, name] = ranked
        return ranked[0]

    def _axes(self, name: str, case: Case) -> list[list[Settings]]:
        """Return the settings to search. They depend on the best settings of earlier cases with the same files."""
        loader = case.loaders[name]
        if settings := self.ranked.get((case.settings_key, loader.settings_row)):
            return [settings[:1]]
        best = self.ranked.get((case.settings_key, name), [])[:_STEP_CANDIDATES] if case.trains else []
        return [best] if best else loader.axes(case.files)

    def _estimate_s(self, case: Case, names: Sequence[str]) -> float:
        """Return the time in seconds that a case takes if none of its rows is skipped."""
        searches = sum(settings_search.max_trials(self._axes(name, case)) for name in names)
        windows = [(searches, self.options.search), (self.options.repeats * len(names), self.options.seconds)]
        return sum(count * (_OPENED_SECONDS + _warm_seconds(case, seconds) + seconds) for count, seconds in windows)

    def _skip(self, case: Case, name: str, why: str) -> None:
        console.print(f"files: {case.title}: {name} skipped: {why}", markup=False)
        self.ranked.pop((case.settings_key, name), None)
        self.settings["skipped"].append(case.labels | {"name": name, "reason": why})
        measurement.release(self.options.device)

    def _write(self) -> None:
        if self.options.json is not None:
            result = results.result(
                "files", rows=self.rows, settings=self.settings, device=self.options.device, environment=self.environment
            )
            results.write(self.options.json, result)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = list(sys.argv[1:] if argv is None else argv)
    base_parser = flags.parser("files", __doc__, batch="256", size=224, seconds=1.0, repeats=2)
    # Unlike in other suites, these flags take several numbers, or parts of names.
    parser = ArgumentParser(
        prog=base_parser.prog,
        description=__doc__,
        formatter_class=base_parser.formatter_class,
        parents=[base_parser],
        conflict_handler="resolve",
    )
    parser.add_argument("--workers", type=flags.numbers, default=(), help="comma-separated (default: derived from the cores)")
    parser.add_argument("--rows", metavar="PART;PART", help="measure only rows whose names are or contain one of these")
    parser.add_argument("--cases", default="small,decode,resnet50,resnet18", help="comma-separated (default: %(default)s)")
    parser.add_argument("--cores", type=flags.numbers, help="comma-separated (default: all up to 16, and 4 if there are more)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="an ImageFolder, instead of the small files")
    parser.add_argument("--photographs", type=Path, metavar="DIR", help="for plain and web (default: of installed packages)")
    parser.add_argument("--rate", type=float, help="limit all rows to this number of images per second")
    parser.add_argument("--search", type=float, default=0.4, help="length of windows that try settings (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="add rows to the existing result, or replace those of a case")
    parser.add_argument("--part", action="store_true", help=SUPPRESS)  # in a child process, whose parent prints the table
    options = flags.parse(parser, arguments)
    names = options.cases.split(",")
    if unknown := [name for name in names if not file_cases.parse_name(name).exists]:
        sets = ", ".join(file_cases.SETS)
        parser.error(
            f"--cases must name {sets} or raw, or decode, no-engines, cpu or a model of torchvision's, alone or after a set "
            f"and a slash, got {', '.join(unknown)}. Separate by commas."
        )
    core_count = allowed_cores()
    options.cores = options.cores or ((min(16, core_count), 4) if core_count > 4 else (core_count,))
    if max(options.cores) > core_count:
        parser.error(f"--cores must be {core_count} at most, got {max(options.cores)}. This process may use no more.")
    result = (
        _measure_here(names, options) if options.cores == (core_count,) else _measure_in_processes(arguments, names, options)
    )
    if options.part:
        return result
    columns = [key for key in COLUMNS if any(key in row for row in result["rows"])]
    print_rows([{key: row.get(key, "") for key in columns} for row in result["rows"]], "files: from encoded files to the card")
    return result


def _measure_here(names: Sequence[str], options: Namespace) -> dict[str, Any]:
    """Measure cases in this process, and return the result."""
    run = _Run(options)
    for name in names:
        for batch_size in options.batch:
            torch.manual_seed(0)
            run.measure_case(file_cases.make(name, batch_size, options))
            measurement.release(options.device)
    if not run.rows:
        raise SystemExit("--rows must name a row that can be measured here, got none. See above why each was skipped.")
    return measurement.finish("files", options, run.rows, run.settings, run.environment, run.start)


def _measure_in_processes(arguments: Sequence[str], names: Sequence[str], options: Namespace) -> dict[str, Any]:
    """Measure cases in one process per number of cores, each of which adds its rows to the result, and return the result."""
    with tempfile.TemporaryDirectory() as folder:
        path = options.json or Path(folder) / "files.json"
        keep = options.keep
        for index, cores in enumerate(options.cores):
            child_cases = [name for name in names if index == 0 or file_cases.parse_name(name).loads_only]
            if not child_cases:
                continue
            child_arguments = ["--part", "--cores", str(cores), "--cases", ",".join(child_cases), "--json", str(path)]
            child_arguments += ["--keep"] if keep else []
            with on_cores(cores):
                process = subprocess.run([sys.executable, "-m", "bench", "files", *arguments, *child_arguments], check=False)
            if process.returncode:
                raise SystemExit(
                    f"files: nothing more is measured, because a process on {cores} cores ended with status "
                    f"{process.returncode}. Its error stands above."
                )
            keep = True
        return json.loads(path.read_text(encoding="utf-8"))
