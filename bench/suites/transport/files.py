"""From encoded files to batches on the card, and into a training step: gpuaug beside DALI and other loaders.

    python -m bench run files
    python -m bench files --cases small --cores 16,4 --rows "DALI;gpuaug" --rate 20000
    python -m bench files --data DIR           an ImageFolder of your own in place of the small files
    python -m bench files --cases web,web/resnet50,plain/no-engines,plain/cpu --photographs DIR

Files are read from folders in the page cache (``bench.data.encoded_images`` and ``bench.data.web_images``; the second makes its
files from the photographs of installed packages, or of a folder from ``python -m bench photographs``). Cases:

small, camera, mix,   loaders alone: RandomResizedCrop 224, HorizontalFlip, ColorJitter without hue and Normalize, antialiased,
plain, web            to half precision and channels last; camera has an eighth of the batch
decode                decoders alone, on small files in memory
resnet50, resnet18    small files into a training step, or any other model of torchvision's by its name
no-engines            loaders alone, as on a card without JPEG engines: DALI's decoders on "mixed" with ``hw_decoder_load=0``,
                      gpuaug's with ``backend="hybrid"``
cpu                   loaders alone, all decoders on the CPU: DALI's best, DALI's with whole images, and gpuaug's
raw                   images that were decoded and resized before, from the page cache: gigabytes a second

web/decode, web/resnet50, plain/no-engines, plain/cpu and so on: the same with the files of that set. Rows of loaders:

torchvision, workers    DataLoader workers decode by torchvision and augment by v2, then a copy
workers decode, fuse    DataLoader workers decode by torchvision into ``collate_ragged``, gpuaug.fuse does the rest
DALI                    fn.readers.file, decoders on "mixed"; float16, since it has no bfloat16
DALI, CPU               the same with decoders on the CPU
SPDL, fuse              threads decode by SPDL to 256 pixels, gpuaug.fuse does the rest
gpuaug                  read_encoded, collate_encoded, DecodeStage and gpuaug.fuse
gpuaug, engines / CPU   the same with that backend; with ``min_side``, where files are of a camera's size
engines alone           nvjpegDecodeBatched on batches in memory, repeatedly (a ceiling)

Each row is measured with its best settings: worker counts, DALI's threads with ``hw_decoder_load``, then crops in the decoder
or after it, then batches ahead. They are searched in short windows, and recorded in the row. A training step tries the three
settings that were best alone. A training step has two more rows, both ceilings: "step alone" (batches on the card) and "step,
engines beside" (the same while as many files are decoded and dropped).

Figures of a row: images per second; ``ratio`` to DALI's and ``of_ceiling`` to the first ceiling's, within a repeat;
``cpu_ms_per_image``, CPU time of this process, its threads and its workers; and ``cores_busy``, CPU time over elapsed time.
``--rate`` limits every row to a number of images per second, to show the CPU time at that rate. Rows are opened for a window
and closed after it, one after another, all of them again in each repeat. The result also has the rates of all settings that
were tried, and of each case's files the quantiles of sides and bytes, a hash and, for plain and web, the seed and its crops.

``--cores 16,4`` measures loaders with each number of cores, in a process that never had more; other cases are measured with the
first number only. The result is written after each row. ``--keep`` adds rows to an existing result: each row has its commit
and its GPU.
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
from bench.peers.file_loaders import Way
from gpuaug.benchkit import results
from gpuaug.benchkit.environment import allowed_cores, environment
from gpuaug.benchkit.windows import synchronize

OURS = [file_loaders.OURS, file_loaders.OURS_ENGINES, file_loaders.OURS_CPU, file_loaders.OURS_SCALED, file_loaders.MAPPED]
COLUMNS = (
    *("case", "name", "images_per_s", "ratio", "of_ceiling"),
    *("cpu_ms_per_image", "cores_busy", "gb_per_s", "chosen"),
)

_WARM_BATCHES, _WARM_SECONDS, _WARM_STEP_SECONDS = 20, 1.0, 4.0
_OPENED_SECONDS = 2.0  # to open and close a row, for the estimate of a case's time
_TRIED_IN_A_STEP = 3


def measure(way: Way, case: Case, settings: Settings, seconds: float, rate: float | None = None) -> dict[str, float]:
    """Images per second and CPU seconds of one window of one row, which is opened before and closed after it."""
    device, step = case.files.device, case.step
    with ExitStack() as stack:
        batches = way.open(case.files, stack, **settings)
        step(*next(batches))
        # Discards batches that became ready while the first one compiled kernels, which takes longest with a training step,
        # and batches that make buffers grow because they are larger than all before.
        count = file_loaders.queued(settings)
        count = 4 * count if case.trains else count + _WARM_BATCHES
        until = perf_counter() + _warm_seconds(case, seconds)
        for _ in range(count):
            step(*next(batches))
            if perf_counter() > until:
                break
        synchronize(device)
        images = 0
        computed = cpu_seconds()
        start = perf_counter()
        now = start
        while now < start + seconds:
            inputs, labels = next(batches)
            step(inputs, labels)
            images += len(labels)
            del inputs
            now = perf_counter()
            if rate and now < (due := start + images / rate):
                time.sleep(due - now)
                now = perf_counter()
        computed = cpu_seconds() - computed  # before the synchronisation, which may spin
        synchronize(device)
        taken = perf_counter() - start
        del batches
    measurement.release(device)
    return {"images_per_s": images / taken, "cpu_ms_per_image": 1e3 * computed / images, "cores_busy": computed / (now - start)}


def _warm_seconds(case: Case, seconds: float) -> float:
    """Maximum time from the first batch to a window of this number of seconds."""
    return min(_WARM_STEP_SECONDS if case.trains else _WARM_SECONDS, 4 * seconds)


def record(case: Case, name: str, found: dict[str, list[dict[str, float]]], chosen: Settings) -> dict[str, Any]:
    """A row of a result, from the repeats of all rows of its case."""
    own = found[name]
    rates = [once["images_per_s"] for once in own]
    row: dict[str, Any] = {
        **case.labels,
        "name": name,
        "images_per_s": median(rates),
        "rounds": rates,
        **{key: median(once[key] for once in own) for key in ("cpu_ms_per_image", "cores_busy")},
    }
    if chosen:
        row["chosen"] = _words(chosen)
    if name == file_loaders.MAPPED:
        row["gb_per_s"] = row["images_per_s"] * case.files.corpus.mean_bytes / 1e9
    for key, other in (("ratio", file_loaders.DALI), ("of_ceiling", case.ceiling)):
        if other in found and (key == "ratio" or other != name):
            ratios = [rate / once["images_per_s"] for rate, once in zip(rates, found[other], strict=False)]
            row[key] = median(ratios)
            if key == "ratio":
                row |= {"ratio_low": min(ratios), "ratio_high": max(ratios)}
    return row


def _words(chosen: Settings) -> str:
    return ", ".join(f"{key} {value}" for key, value in chosen.items())


class _Run:
    """The measurements so far: rows, skipped rows, and the best settings of rows."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.environment = environment(options.device)
        self.start = perf_counter()
        self.rows: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {"skipped": [], "files": {}, "tried": {}}
        if options.keep and options.json is not None and options.json.exists():
            kept = json.loads(options.json.read_text(encoding="utf-8"))
            self.rows = kept["rows"]
            self.settings |= {key: kept["settings"][key] for key in self.settings if key in kept["settings"]}
        self.settings |= {
            "versions": file_loaders.versions(),
            "baseline": file_loaders.DALI,
            "ours": OURS,
            "ceilings": [decoders.ENGINES, file_cases.STEP, file_cases.BESIDE],
        }
        self.ranked: dict[tuple[str, str], list[Settings]] = {}

    def case(self, case: Case) -> None:
        """Measure a case, row by row, in repeats of all rows."""
        wanted = self.options.rows.split(";") if self.options.rows else [""]
        names = [name for name in case.ways if any(part == name if part in case.ways else part in name for part in wanted)]
        corpus, labels = case.files.corpus, case.labels
        self.settings["files"][case.title] = corpus.facts
        self.settings["tried"][case.title] = {}
        facts = "; ".join(f"{key} {value}" for key, value in corpus.facts.items())
        console.print(f"files: {case.title}: about {self._estimate_s(case, names):.0f} s; {facts}", markup=False)
        self.settings["skipped"] = [row for row in self.settings["skipped"] if not labels.items() <= row.items()]
        before = [row for row in self.rows if not labels.items() <= row.items()]
        found: dict[str, list[dict[str, float]]] = {}
        chosen: dict[str, Settings] = {}
        for repeat in range(self.options.repeats):
            for name in names if repeat % 2 == 0 else names[::-1]:
                if repeat and name not in found:
                    continue  # it was skipped
                torch.manual_seed(0)
                try:
                    if name not in chosen:
                        chosen[name] = self._best(name, case)
                    once = measure(case.ways[name], case, chosen[name], self.options.seconds, self.options.rate)
                # Any error of a row skips that row only.
                except Exception as error:
                    found.pop(name, None)
                    self._skip(case, name, reason(error))
                    continue
                found.setdefault(name, []).append(once)
                told = ", ".join(filter(None, [f"{once['images_per_s']:,.0f} images/s", _words(chosen[name])]))
                console.print(f"files: {case.title}: {name}: {told}", markup=False)
                self.rows = before + self._records(case, names, found, chosen)
                self._write()
        self.rows = before + self._records(case, names, found, chosen)

    def _records(
        self, case: Case, names: list[str], found: dict[str, Any], chosen: dict[str, Settings]
    ) -> list[dict[str, Any]]:
        # Each row has its commit and its GPU: with --keep, rows of a file come from several runs.
        gpu = self.environment["gpu"]
        own = {"commit": self.environment["commit"]} | ({"gpu": gpu["name"]} if gpu else {})
        return [record(case, each, found, chosen[each]) | own for each in names if each in found]

    def _best(self, name: str, case: Case) -> Settings:
        way = case.ways[name]
        if way.needs_gpu and self.options.device.type != "cuda":
            raise MissingError("needs a GPU")
        axes = self._axes(name, case)
        tried: dict[str, float] = {}

        def rate(settings: Settings) -> float:
            try:
                found = measure(way, case, settings, self.options.search)["images_per_s"]
            finally:
                measurement.release(self.options.device)
            tried[_words(settings)] = found
            return found

        ranked = settings_search.ranked(axes, rate)
        if tried:
            self.settings["tried"][case.title][name] = tried
        if not case.trains:
            self.ranked[case.searched, name] = ranked
        return ranked[0]

    def _axes(self, name: str, case: Case) -> list[list[Settings]]:
        """Settings to choose from, which depend on the best settings found for the same files before."""
        way = case.ways[name]
        if settled := self.ranked.get((case.searched, way.settled_by)):
            return [settled[:1]]
        best = self.ranked.get((case.searched, name), [])[:_TRIED_IN_A_STEP] if case.trains else []
        return [best] if best else way.axes(case.files)

    def _estimate_s(self, case: Case, names: Sequence[str]) -> float:
        """Time of a case, if none of its rows is skipped."""
        searches = sum(settings_search.most(self._axes(name, case)) for name in names)
        windows = [(searches, self.options.search), (self.options.repeats * len(names), self.options.seconds)]
        return sum(count * (_OPENED_SECONDS + _warm_seconds(case, each) + each) for count, each in windows)

    def _skip(self, case: Case, name: str, why: str) -> None:
        console.print(f"files: {case.title}: {name} skipped: {why}", markup=False)
        self.ranked.pop((case.searched, name), None)
        self.settings["skipped"].append(case.labels | {"name": name, "reason": why})
        measurement.release(self.options.device)

    def _write(self) -> None:
        if self.options.json is not None:
            made = results.result(
                "files", rows=self.rows, settings=self.settings, device=self.options.device, environment=self.environment
            )
            results.write(self.options.json, made)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    words = list(sys.argv[1:] if argv is None else argv)
    usual = flags.parser("files", __doc__, batch="256", size=224, seconds=1.0, repeats=2)
    # Unlike those of the other suites, these flags take several numbers, or parts of names.
    parser = ArgumentParser(
        prog=usual.prog, description=__doc__, formatter_class=usual.formatter_class, parents=[usual], conflict_handler="resolve"
    )
    parser.add_argument("--workers", type=flags.numbers, default=(), help="comma-separated (default: some that suit the cores)")
    parser.add_argument("--rows", metavar="PART;PART", help="measure only these, or those with one of these in their names")
    parser.add_argument("--cases", default="small,decode,resnet50,resnet18", help="comma-separated (default: %(default)s)")
    parser.add_argument("--cores", type=flags.numbers, help="comma-separated (default: 16 at most, and 4 if there are more)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="an ImageFolder, instead of the small files")
    parser.add_argument("--photographs", type=Path, metavar="DIR", help="for plain and web (default: of installed packages)")
    parser.add_argument("--rate", type=float, help="hold all rows to so many images a second")
    parser.add_argument("--search", type=float, default=0.4, help="length of windows that try settings (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="add to the result that is there, case by case")
    parser.add_argument("--part", action="store_true", help=SUPPRESS)  # of a run whose table comes at its end
    options = flags.read(parser, words)
    names = options.cases.split(",")
    if unknown := [name for name in names if not file_cases.kind(name).known]:
        sets = ", ".join(file_cases.SETS)
        parser.error(
            f"--cases must name {sets} or raw, or decode, no-engines, cpu or a model of torchvision's, alone or after a set "
            f"and a slash, got {', '.join(unknown)}. Separate by commas."
        )
    allowed = allowed_cores()
    options.cores = options.cores or ((min(16, allowed), 4) if allowed > 4 else (allowed,))
    if max(options.cores) > allowed:
        parser.error(f"--cores must be {allowed} at most, got {max(options.cores)}. This process may use no more.")
    made = _measured(names, options) if options.cores == (allowed,) else _in_processes(words, names, options)
    if options.part:
        return made
    columns = [key for key in COLUMNS if any(key in row for row in made["rows"])]
    print_rows([{key: row.get(key, "") for key in columns} for row in made["rows"]], "files: from encoded files to the card")
    return made


def _measured(names: Sequence[str], options: Namespace) -> dict[str, Any]:
    """The result of some cases, measured in this process."""
    run = _Run(options)
    for name in names:
        for batch_size in options.batch:
            torch.manual_seed(0)
            run.case(file_cases.make(name, batch_size, options))
            measurement.release(options.device)
    if not run.rows:
        raise SystemExit("--rows must name a row that can be measured here, got none. See above why each was skipped.")
    return measurement.finish("files", options, run.rows, run.settings, run.environment, run.start)


def _in_processes(words: Sequence[str], names: Sequence[str], options: Namespace) -> dict[str, Any]:
    """The result of one process per number of cores; each adds its rows to the earlier ones."""
    with tempfile.TemporaryDirectory() as folder:
        path = options.json or Path(folder) / "files.json"
        keep = options.keep
        for index, cores in enumerate(options.cores):
            own = [name for name in names if index == 0 or file_cases.kind(name).loads]
            if not own:
                continue
            told = ["--part", "--cores", str(cores), "--cases", ",".join(own), "--json", str(path)]
            told += ["--keep"] if keep else []
            with on_cores(cores):
                ended = subprocess.run([sys.executable, "-m", "bench", "files", *words, *told], check=False)
            if ended.returncode:
                raise SystemExit(
                    f"files: nothing more is measured, because a process on {cores} cores ended with status "
                    f"{ended.returncode}. Its error stands above."
                )
            keep = True
        return json.loads(path.read_text(encoding="utf-8"))
