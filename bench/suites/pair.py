"""Compare the speed of two checkouts of gpuaug, to find out whether a change made it slower.

    python -m bench pair ../before --json pair.json

Rows of gpuaug from the suites ``augment``, ``ragged``, ``detection``, ``feeds``, ``files``, ``classifier``,
``encoder_decoder`` and ``launch_bound`` run in two processes at the same time: one imports gpuaug from the other checkout, one
from this. Windows alternate between the processes, so that drift
affects both equally. Several pairs of processes are started, one after another, to average over differences between processes
(streams of the pool, memory).

Figures of a row: images per second of both checkouts; ratio of this checkout to the other, with its 95 % interval over the
pairs of processes; numbers of kernels and allocations per batch of both. ``ratio_low`` is the lower end of the interval.
"""

import json
import math
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.data import encoded_images
from bench.harness.console import console, print_rows
from bench.harness.result_check import check_result
from gpuaug.benchkit import results
from gpuaug.benchkit.environment import environment

ROOT = Path(__file__).parents[2]


class Child:
    """Process that runs rows with the gpuaug of one checkout, on request."""

    def __init__(self, package: Path, options: Namespace) -> None:
        command = [sys.executable, "-m", "bench.suites.pair_child"]
        for name in ("device", "workers", "size", "batch", "rows", "files"):
            value = getattr(options, name)
            command += [f"--{name}", "" if value is None else str(value)]
        inherited_path = os.environ.get("PYTHONPATH")
        paths = os.pathsep.join([str(package), str(ROOT), *([inherited_path] if inherited_path else [])])
        # Without PYTHONSAFEPATH the current folder, which may have another gpuaug, would come first.
        variables = {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> Any:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Wait for the next answer, and return it. Other lines, which libraries print, are written to stderr."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)["answer"]
            sys.stderr.write(line)
        status = self._process.wait()
        raise SystemExit(f"pair: nothing was measured, because a process ended with status {status}. Its error stands above.")

    def close(self) -> None:
        """End the process."""
        self._process.communicate("")


@contextmanager
def start_children(packages: Sequence[Path], options: Namespace) -> Iterator[list[Child]]:
    """Start one process per checkout, and end them when the context ends."""
    processes = [Child(package, options) for package in packages]
    try:
        yield processes
    finally:
        for child in processes:
            child.close()


def measure(packages: Sequence[Path], options: Namespace) -> Iterator[dict[str, dict[str, Any]]]:
    """Measure all rows, and yield after each pair of processes the measurements so far by row: rates, and counts per batch."""
    measurements: dict[str, dict[str, Any]] = {}
    for generation in range(options.processes):
        with start_children(packages, options) as pair:
            groups: list[list[str]] = [child.answer() for child in pair][-1]
            # Rows with workers come last, because workers refill their queues while other rows run.
            for names in groups:
                rates: dict[str, list[list[float]]] = {name: [] for name in names}
                for number in range(options.rounds):
                    for name in names:
                        order = (0, 1) if (number + generation) % 2 else (1, 0)
                        rate_by_index = {index: pair[index].ask(row=name, seconds=options.seconds) for index in order}
                        rates[name].append([rate_by_index[0], rate_by_index[1]])
                for name in names:
                    row = measurements.setdefault(name, {"rates": []})
                    row["rates"].append(rates[name])
                    if generation == 0:
                        row["counts"] = [child.ask(row=name, count=True) for child in pair]
        console.print(f"pair: processes {generation + 1} of {options.processes}", markup=False)
        yield measurements


def interval(ratios: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the geometric mean over pairs of processes of their median ratio, and its 95 % interval."""
    logs = [math.log(median(rounds)) for rounds in ratios]
    mean_log = fmean(logs)
    half_width = 0.0
    if len(logs) > 1:
        from scipy.special import stdtrit  # scipy.stats takes a second to import

        half_width = float(stdtrit(len(logs) - 1, 0.975)) * stdev(logs) / math.sqrt(len(logs))
    return {
        "ratio": math.exp(mean_log),
        "ratio_low": math.exp(mean_log - half_width),
        "ratio_high": math.exp(mean_log + half_width),
    }


def create_row(name: str, measurement: dict[str, Any]) -> dict[str, Any]:
    """Return the result's row ``name``."""
    ratios = [[after / before for before, after in rounds] for rounds in measurement["rates"]]
    rates = [rate for rounds in measurement["rates"] for rate in rounds]
    before, after = measurement["counts"]
    return {
        "name": name,
        **interval(ratios),
        "other_images_per_s": median(rate for rate, _ in rates),
        "this_images_per_s": median(rate for _, rate in rates),
        **{f"other_{key}": value for key, value in before.items()},
        **{f"this_{key}": value for key, value in after.items()},
        "ratios": ratios,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ArgumentParser(prog="python -m bench pair", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout: a folder with a folder gpuaug")
    parser.add_argument("--device", type=torch.device, help="default: the GPU if there is one, else the CPU")
    parser.add_argument("--rows", metavar="NAME;NAME", help="measure only these rows")
    parser.add_argument("--files", type=Path, metavar="DIR", help="class folders of images for the row files (default: small)")
    parser.add_argument("--workers", type=int, default=12, help="DataLoader workers (default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=256, help="batch size; 32 in training and detection (default: %(default)s)"
    )
    parser.add_argument("--size", type=int, default=256, help="side of the images in pixels (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.2, help="length of one window (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=6, help="windows of a row in one pair of processes (default: %(default)s)"
    )
    parser.add_argument("--processes", type=int, default=6, help="pairs of processes, one after another (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there")
    options = parser.parse_args(argv)
    if not (options.other / "gpuaug" / "__init__.py").exists():
        parser.error(f"other must be a checkout of gpuaug, got {options.other}. Pass the folder that holds the folder gpuaug.")
    if options.files is None and "files" in (options.rows or "files").split(";"):
        options.files = encoded_images.make("small")
    if options.device is None:
        options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = environment(torch.device(options.device.type, 0) if options.device.type == "cuda" else options.device)
    with TemporaryDirectory() as folder:
        packages = []
        for name, checkout in (("other", options.other), ("this", ROOT)):
            package = Path(folder) / name
            package.mkdir()
            (package / "gpuaug").symlink_to((checkout / "gpuaug").resolve())
            packages.append(package)
        for measurements in measure(packages, options):
            rows = [create_row(name, measurement) for name, measurement in measurements.items()]
            settings = {key: value for key, value in vars(options).items() if key not in ("json", "device", "other", "files")}
            result = results.result("pair", rows=rows, settings=settings, device=options.device, environment=machine)
            if options.json is not None:
                results.write(options.json, result)  # an interruption loses only one pair
    check_result(result)
    columns = ("name", "other_images_per_s", "this_images_per_s", "ratio", "ratio_low", "ratio_high")
    counts = [key for key in rows[0] if key.endswith(("_kernels", "_allocations"))]
    print_rows([{key: row.get(key, "") for key in (*columns, *counts)} for row in rows], "pair: this checkout over the other")
    return result


if __name__ == "__main__":
    main()
