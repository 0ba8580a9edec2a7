"""From encoded files to batches on the card, and into a training step: gpuaug beside DALI and other loaders.

    python -m bench run files
    python -m bench files --cases small --cores 16,4 --rows "DALI;gpuaug" --rate 20000
    python -m bench files --data DIR           an ImageFolder of your own in place of the small files

Files are read from folders in the page cache (``bench.data.encoded_images``). Cases:

small, camera, mix    loaders alone: RandomResizedCrop 224, HorizontalFlip, ColorJitter without hue and Normalize, antialiased,
                      to half precision and channels last; camera has an eighth of the batch
decode                decoders alone, on small files in memory
resnet50, resnet18    small files into a training step, or any other model of torchvision's by its name
raw                   images that were decoded and resized before, from the page cache: gigabytes a second

Rows of loaders:

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
and closed after it, one after another, all of them again in each repeat.

``--cores 16,4`` measures loaders with each number of cores, in a process that never had more; other cases are measured with the
first number only. The result is written after each row. ``--keep`` adds rows to an existing result: each row has its commit.
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
        count, most_s = (4 * count, _WARM_STEP_SECONDS) if case.trains else (count + _WARM_BATCHES, _WARM_SECONDS)
        until = perf_counter() + min(most_s, 4 * seconds)
        for _ in range(count):
            step(*next(batches))
            if perf_counter() > until:
                break
        synchronize(device)
        images, computed, start = 0, cpu_seconds(), perf_counter()
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
        self.environment, self.start = environment(options.device), perf_counter()
        self.rows: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {"skipped": [], "files": {}}
        if options.keep and options.json is not None and options.json.exists():
            kept = json.loads(options.json.read_text(encoding="utf-8"))
            self.rows = kept["rows"]
            self.settings = {key: kept["settings"][key] for key in self.settings}
        self.settings |= {
            "baseline": file_loaders.DALI,
            "ours": OURS,
            "ceilings": [decoders.ENGINES, file_cases.STEP, file_cases.BESIDE],
        }
        self.ranked: dict[str, list[Settings]] = {}

    def case(self, case: Case) -> None:
        """Measure a case, row by row, in repeats of all rows."""
        wanted = self.options.rows.split(";") if self.options.rows else [""]
        names = [name for name in case.ways if any(part == name if part in case.ways else part in name for part in wanted)]
        corpus, labels = case.files.corpus, case.labels
        self.settings["files"][case.title] = {"count": corpus.count, "mean_bytes": round(corpus.mean_bytes)}
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
        # Each row has its commit: with --keep, rows of a file come from several runs.
        own = {"commit": self.environment["commit"]}
        return [record(case, each, found, chosen[each]) | own for each in names if each in found]

    def _best(self, name: str, case: Case) -> Settings:
        way = case.ways[name]
        if way.needs_gpu and self.options.device.type != "cuda":
            raise MissingError("needs a GPU")
        if way.settled_by in self.ranked:
            return self.ranked[way.settled_by][0]
        best = self.ranked.get(name, [])[:_TRIED_IN_A_STEP] if case.trains else []

        def rate(settings: Settings) -> float:
            try:
                return measure(way, case, settings, self.options.search)["images_per_s"]
            finally:
                measurement.release(self.options.device)

        ranked = settings_search.ranked([best] if best else way.axes(case.files), rate)
        if not case.trains:
            self.ranked[name] = ranked
        return ranked[0]

    def _skip(self, case: Case, name: str, why: str) -> None:
        console.print(f"files: {case.title}: {name} skipped: {why}", markup=False)
        self.ranked.pop(name, None)
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
    parser.add_argument("--rate", type=float, help="hold all rows to so many images a second")
    parser.add_argument("--search", type=float, default=0.4, help="length of windows that try settings (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="add to the result that is there, case by case")
    parser.add_argument("--part", action="store_true", help=SUPPRESS)  # of a run whose table comes at its end
    options = flags.read(parser, words)
    kinds = options.cases.split(",")
    if unknown := [kind for kind in kinds if not file_cases.is_known(kind)]:
        known = ", ".join((*file_cases.LOADING, file_cases.DECODE, file_cases.RAW))
        parser.error(f"--cases must name {known} or models of torchvision's, got {', '.join(unknown)}. Separate by commas.")
    allowed = allowed_cores()
    options.cores = options.cores or ((min(16, allowed), 4) if allowed > 4 else (allowed,))
    if max(options.cores) > allowed:
        parser.error(f"--cores must be {allowed} at most, got {max(options.cores)}. This process may use no more.")
    made = _measured(kinds, options) if options.cores == (allowed,) else _in_processes(words, kinds, options)
    if options.part:
        return made
    columns = [key for key in COLUMNS if any(key in row for row in made["rows"])]
    print_rows([{key: row.get(key, "") for key in columns} for row in made["rows"]], "files: from encoded files to the card")
    return made


def _measured(kinds: Sequence[str], options: Namespace) -> dict[str, Any]:
    """The result of some cases, measured in this process."""
    run = _Run(options)
    for kind in kinds:
        for batch_size in options.batch:
            torch.manual_seed(0)
            run.case(file_cases.make(kind, batch_size, options))
            measurement.release(options.device)
    if not run.rows:
        raise SystemExit("--rows must name a row that can be measured here, got none. See above why each was skipped.")
    return measurement.finish("files", options, run.rows, run.settings, run.environment, run.start)


def _in_processes(words: Sequence[str], kinds: Sequence[str], options: Namespace) -> dict[str, Any]:
    """The result of one process per number of cores; each adds its rows to the earlier ones."""
    with tempfile.TemporaryDirectory() as folder:
        path = options.json or Path(folder) / "files.json"
        keep = options.keep
        for index, cores in enumerate(options.cores):
            own = [kind for kind in kinds if index == 0 or kind in file_cases.LOADING]
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
