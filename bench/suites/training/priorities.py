"""Training loops with the step on the default stream, and on a stream of higher priority, inside ``gpuaug.step_first``.

    python -m bench run priorities
    python -m bench priorities --cases encoder-decoder,plain/resnet50,plain/resnet18 --no-numba
    python -m bench priorities --cases web/resnet50,web/resnet18 --photographs DIR

CUDA starts kernels of streams of high priority first, and the default stream has the lowest. Each row is measured with the step
on the default stream, and with the step first (", step first"), in alternating windows of the same loop. Cases:

encoder-decoder          published loops with streams, one by hand with waits in both directions, gpuaug and resident batches
frozen resnet50, vit     a head after a frozen encoder in a CUDA graph
latents                  a diffusion step after a VAE and a text encoder
fused beside resnet50    an augmentation of a few launches beside a step that fills the device
launch-bound             a ResNet-18 that is bound by the host
plain/resnet50, …        files into a training step, as in the suite ``files``, with the settings that were best there

Rows of files: DALI; gpuaug, whose decoder converts colours on lanes of priority -1 (*equal* to a step that is first, above the
default stream); the same with these lanes at 0 (*below*) and at -2 (*above*); the step beside the engines; the step alone.

Figures of a row: ``gain`` of the step first over the same row on the default stream; ``ratio`` to the case's peer and
``of_ceiling``, both with the same choice of stream; each the median over rounds. ``--no-numba`` measures as if Numba were not
installed.
"""

import importlib
import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from unittest import mock

import torch

from bench.harness import flags, measurement
from bench.harness.console import console, print_rows
from bench.harness.loops import FIRST, loop, with_step_first
from bench.harness.optional_rows import PeerError, SkippedRow, peer_row
from bench.harness.processes import settle
from bench.peers import file_cases, file_loaders
from bench.peers.file_cases import STEP_ALONE, STEP_BESIDE, Case
from bench.peers.file_loaders import DALI, OURS
from gpuaug.benchkit import results
from gpuaug.benchkit.environment import allowed_cores, environment
from gpuaug.benchkit.windows import Variant, Window, interleave, summarise
from gpuaug.core import streams


class SuiteCase(NamedTuple):
    """Rows of another suite in this folder. ``peer`` and ``ceiling``: rows that ratios refer to; empty for no ratio."""

    suite: str
    flags: str
    rows: tuple[str, ...]
    peer: str
    ceiling: str


_FROZEN = ("serial", "feature stage", "training alone")

SUITE_CASES = {
    "encoder-decoder": SuiteCase(
        "encoder_decoder",
        "--batch 8,32 --repeats 5",
        ("two streams, as published", "two streams, both waits", "streamed", "resident"),
        "two streams, as published",
        "resident",
    ),
    "frozen resnet50": SuiteCase("frozen_resnet", "--batch 32,128", _FROZEN, "serial", "training alone"),
    "frozen vit": SuiteCase("frozen_resnet", "--model vit_b_16 --batch 32", _FROZEN, "serial", "training alone"),
    "latents": SuiteCase("latents", "--batch 2,8", ("serial", "feature stages", "training alone"), "serial", "training alone"),
    "fused beside resnet50": SuiteCase("resnet_step", "--batch 256", ("streamed, fused", "resident"), "", "resident"),
    "launch-bound": SuiteCase(
        "launch_bound",
        "",
        ("DataLoader, pinned", "StreamedLoader, fused", "resident"),
        "DataLoader, pinned",
        "resident",
    ),
}
FILE_CASES = ("plain/resnet50", "plain/resnet18", "web/resnet50", "web/resnet18")

CONVERSIONS = {OURS: streams.URGENT_PRIORITY, f"{OURS}, conversions at 0": 0, f"{OURS}, conversions at -2": -2}
"""Name of a row: priority of the lanes on which the decoder converts colours."""

COLUMNS = ("name", "batch_size", "images_per_s", "gain", "gain_low", "gain_high", "ratio", "of_ceiling")

_OURS = (*CONVERSIONS, "streamed", "streamed, fused", "StreamedLoader, fused", "feature stage", "feature stages")
_CEILINGS = ("resident", "training alone", STEP_ALONE, STEP_BESIDE)
_WORKERS = 4
_DALI_LOAD = {"plain": 1.0, "web": 0.65}  # the best hw_decoder_load of stored results
_PASSES = 2  # number of times that each row of files is opened


def suite_rows(case: SuiteCase, arguments: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (rows, skipped rows) of another suite. ``arguments``: flags after the flags of the case."""
    suite_main = importlib.import_module(f"bench.suites.training.{case.suite}").main
    result = suite_main([*shlex.split(case.flags), "--rows", ";".join(case.rows), *arguments, "--step-first"])
    rows = result["rows"]
    groups = {row["batch_size"]: [other for other in rows if other["batch_size"] == row["batch_size"]] for row in rows}
    return [row for group in groups.values() for row in with_ratios(group, case.peer, case.ceiling)], result["settings"][
        "skipped"
    ]


def file_rows(name: str, options: Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (rows, skipped rows) of a case of the suite ``files``.

    Rows are opened one after another, because two decoders must not use the engines at the same time. In each of ``_PASSES``
    passes a row is opened, measured in alternating windows without and with ``step_first``, and closed.
    """
    case = file_cases.make(name, options.batch[0], options)
    windows: dict[str, list[Window]] = {}
    reasons: dict[str, str] = {}
    makers = _file_makers(case, file_cases.parse_name(name).file_set)
    for pass_index in range(_PASSES):
        for row_name, make in list(makers.items())[:: -1 if pass_index % 2 else 1]:
            if row_name in reasons:
                continue
            torch.manual_seed(0)
            with ExitStack() as stack:
                row = peer_row(
                    row_name, options.device, partial(make, row_name, stack), needs_gpu=row_name in (DALI, STEP_BESIDE)
                )
                if isinstance(row, SkippedRow):
                    reasons[row_name] = row.reason
                    continue
                try:
                    measured = interleave(
                        with_step_first(row),
                        device=options.device,
                        seconds=options.seconds,
                        repeats=-(-options.repeats // _PASSES),
                        settle=settle,
                    )
                except PeerError as error:
                    reasons[row_name] = error.reason
                    continue
                finally:
                    del row
            measurement.release(options.device)
            for variant_name, variant_windows in measured.items():
                windows.setdefault(variant_name, []).extend(variant_windows)
    complete = {key: value for key, value in windows.items() if key.removesuffix(FIRST) not in reasons}
    in_order = {key: complete[key] for key in _with_twins(list(makers)) if key in complete}
    rows = [row.record(batch_size=case.files.batch_size) for row in summarise(in_order, baseline=None)]
    skipped = [{"name": row_name, "reason": reason} for row_name, reason in reasons.items()]
    return with_ratios(rows, DALI, STEP_ALONE), skipped


def _file_makers(case: Case, file_set: str) -> dict[str, Callable[[str, ExitStack], Variant]]:
    """Return name of a row: function that opens it."""
    threads = min(16, case.files.cores)

    def make(name: str, stack: ExitStack) -> Variant:
        settings: dict[str, Any] = {}
        if name == DALI:
            settings = {"threads": threads, "load": _DALI_LOAD[file_set], "region": True, "ahead": 2}
        elif name in CONVERSIONS:
            settings = {"workers": min(_WORKERS, case.files.cores)}
        loader = case.loaders[OURS if name in CONVERSIONS else name]
        with mock.patch.object(streams, "URGENT_PRIORITY", CONVERSIONS.get(name, streams.URGENT_PRIORITY)):
            batches = loader.open(case.files, stack, **settings)
        return Variant(name, loop(batches, case.step), file_loaders.queue_length(settings))

    return dict.fromkeys((DALI, *CONVERSIONS, STEP_BESIDE, STEP_ALONE), make)


def with_ratios(rows: list[dict[str, Any]], peer: str, ceiling: str) -> list[dict[str, Any]]:
    """Add ``gain``, ``ratio`` and ``of_ceiling`` to the rows of one case and batch size."""
    rates = {row["name"]: row["rounds"] for row in rows}
    for row in rows:
        name = row["name"].removesuffix(FIRST)
        ending = row["name"].removeprefix(name)
        references = {"ratio": peer + ending, "of_ceiling": ceiling + ending, "gain": name if ending else ""}
        for key, reference in references.items():
            if reference in rates and reference != row["name"]:
                ratios = [rate / other for rate, other in zip(row["rounds"], rates[reference], strict=True)]
                row |= {key: median(ratios), f"{key}_low": min(ratios), f"{key}_high": max(ratios)}
    return rows


def _with_twins(names: Sequence[str]) -> list[str]:
    return [name + ending for name in names for ending in ("", FIRST)]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = list(sys.argv[1:] if argv is None else argv)
    own_parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser = flags.parser("priorities", __doc__, batch="256", size=224, seconds=0.8, repeats=4, spare=0)
    every_case = (*SUITE_CASES, *FILE_CASES)
    for each in (own_parser, parser):
        each.add_argument("--cases", default=",".join(every_case), help="comma-separated (default: %(default)s)")
        each.add_argument("--keep", action="store_true", help="keep the cases of an existing result that are not measured now")
        each.add_argument("--no-numba", action="store_true", help="measure as if Numba were not installed")
        each.add_argument("--photographs", type=Path, metavar="DIR", help="for the files (default: of installed packages)")
    own_parser.add_argument("--json", type=Path)
    options = flags.parse(parser, arguments)
    _, suite_arguments = own_parser.parse_known_args(arguments)  # flags for other suites, which have defaults of their own
    names = options.cases.split(",")
    if unknown := [name for name in names if name not in every_case]:
        parser.error(f"--cases must be among {', '.join(every_case)}, got {', '.join(unknown)}. Separate by commas.")
    if options.no_numba:
        sys.modules["numba"] = None  # type: ignore[assignment]
    # Options of the cases of files.
    options.cores = (min(16, allowed_cores()),)
    options.workers = ()
    options.rate = None
    options.data = None
    start = perf_counter()
    machine = environment(options.device)
    rows: list[dict[str, Any]] = []
    if options.keep and options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
    # With --keep, rows come from several runs.
    origin = {
        "commit": machine["commit"],
        "gpu": machine["gpu"]["name"] if machine["gpu"] else "CPU",
        "cores_allowed": machine["cpu"]["cores_allowed"],
    }
    settings: dict[str, Any] = {"skipped": [], "ours": _with_twins(_OURS), "ceilings": _with_twins(_CEILINGS)}
    for name in names:
        case = SUITE_CASES.get(name)
        case_rows, skipped = suite_rows(case, suite_arguments) if case else file_rows(name, options)
        label = {"case": f"{name}, without Numba" if options.no_numba and not case else name}
        rows = [row for row in rows if row["case"] != label["case"]] + [label | origin | row for row in case_rows]
        settings["skipped"] += [label | row for row in skipped]
        print_rows([{key: row[key] for key in COLUMNS if key in row} for row in case_rows], f"priorities: {label['case']}")
        console.print(*(f"{row['name']} skipped: {row['reason']}" for row in skipped), sep="\n", markup=False)
        if options.json is not None:
            partial_result = results.result(
                "priorities", rows=rows, settings=settings, device=options.device, environment=machine
            )
            results.write(options.json, partial_result)
    return measurement.finish("priorities", options, rows, settings, machine, start)
