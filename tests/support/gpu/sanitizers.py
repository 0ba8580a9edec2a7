"""Run the kernels of filters and of image processors under NVIDIA's sanitizer, and loaders under PyTorch's.

From the root of the repository, on a machine with a GPU::

    PYTHONPATH=tests:. python -m support.gpu.sanitizers                       all tools
    PYTHONPATH=tests:. python -m support.gpu.sanitizers memcheck initcheck    some of them
    PYTHONPATH=tests:. python -m support.gpu.sanitizers --seconds 120 --json bench/results/sanitizers.json

A tool that is not installed is skipped. A tool that takes longer than ``--seconds`` is ended; its row then says so. The last
line is a summary, and the exit code is 1 if a tool has found an error, or a test has failed.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import torch

from gpuaug.benchkit import results

KERNELS = ["tests/gpu/test_fused.py", "tests/gpu/test_processors.py"]
CHOSEN = (
    "(uint8 or wide or skipped or kernel_equals_torch or results_are_those) and not clips and not launch and "
    "(blur or sharp or CLAHE or contrast or equalize or Processor or results)"
)
"""Tests of the kernels of filters, in ``filters/frame.py``, and of image processors."""

LOADERS = ["tests/gpu", "tests/decode"]
WITHOUT_RACES = "not graph and not captur and not removed and not ctrl_c and not interrupt and not planted and not synchronise"
"""Tests without CUDA graphs, without interrupts, which would end a call of the sanitizer, and without races on purpose."""

TORCH_PLUGIN = ["-p", "support.gpu.torch_sanitizer"]

TOOLS = ("memcheck", "racecheck", "initcheck", "torch")
ERRORS = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)|(CSAN detected)")


def find_sanitizer():
    """Path of ``compute-sanitizer``: on the PATH, in CUDA's folder, or in a package of pip; ``None`` without one."""
    folders = [Path("/usr/local/cuda/bin"), *Path(torch.__file__).parents[1].glob("nvidia/*/bin")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)]))


def command_of(tool, processes):
    """Command and further variables of a tool; ``None`` if the tool is not installed."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "0"]
    pytest += ["-m", "gpu" if torch.cuda.device_count() > 1 else "gpu and not multigpu"]
    if tool == "torch":
        return [*pytest, *TORCH_PLUGIN, "-n", str(processes), *LOADERS, "-k", WITHOUT_RACES], {
            "TORCH_CUDA_SANITIZER": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        }
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return None
    # Without the cache, memory of a freed tensor is not reused, so that an access after the end of a tensor is an error.
    options = ["--tool", tool, "--target-processes", "all", "--print-limit", "20"]
    return [sanitizer, *options, *pytest, *KERNELS, "-k", CHOSEN], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def run(tool, seconds, processes):
    """Row of a tool in the result."""
    found = command_of(tool, processes)
    if found is None:
        return {"name": tool, "took_s": 0.0, "outcome": "skipped: compute-sanitizer is not installed", "errors": 0}
    command, variables = found
    start = perf_counter()
    environment = {**os.environ, **variables, "GPUAUG_REQUIRE_GPU": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, env=environment, **pipes)
    try:
        text, code = process.communicate(timeout=seconds)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool and the process that it runs
        text, code = process.communicate()[0], None
    counts = [int(match[1]) if match[1] else 1 for match in ERRORS.finditer(text)]
    tests = text.strip().splitlines()[-1] if code is not None and text.strip() else ""
    tests = next((line for line in reversed(text.splitlines()) if re.search(r"\d+ (passed|failed)", line)), tests)
    outcome = f"ended after {seconds:g} s" if code is None else tests
    errors = sum(counts) or int(code is not None and (code != 0 or " passed" not in outcome))
    sys.stdout.write(text + "\n")
    return {"name": tool, "took_s": perf_counter() - start, "outcome": outcome, "errors": errors}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", help=f"default: {', '.join(TOOLS)}")
    parser.add_argument("--seconds", type=float, default=1800, help="limit per tool (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=0, help="number of processes of PyTorch's sanitizer (pytest -n)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    rows = []
    for tool in options.tools or TOOLS:
        rows.append(run(tool, options.seconds, options.processes))
        if options.json is not None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            results.write(options.json, results.result("sanitizers", rows=rows, settings={"tests": CHOSEN}, device=device))
    summary = "; ".join(f"{row['name']}: {row['errors']} errors, {row['outcome']}" for row in rows)
    sys.stdout.write(f"sanitizers: {summary}\n")
    return int(any(row["errors"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
