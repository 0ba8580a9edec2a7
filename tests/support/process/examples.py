"""Examples as a user runs them: in this process, in another, or under torchrun."""

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


def run_example(name, *arguments):
    """Run an example in this process, which has imported torch already."""
    path = EXAMPLES / f"{name}.py"
    with mock.patch.object(sys, "argv", [str(path), *map(str, arguments)]):
        return runpy.run_path(str(path), run_name="__main__")


def started(command, **variables):
    """A process of this Python, with one thread, that can import gpuaug."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *map(str, command)], env=environment, **pipes)


def finished(*processes, timeout_s=240):
    """What the processes printed. All of them have to succeed."""
    try:
        printed = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(printed)
    return printed


def torchrun(*options):
    """The arguments of Python that run a script under torchrun."""
    return ["-m", "torch.distributed.run", *options]


def free_port(host="127.0.0.1"):
    with socket.socket() as found:
        found.bind((host, 0))
        return found.getsockname()[1]


def differences(one, two, at=""):
    """Where two checkpoints differ."""
    if isinstance(one, list) and isinstance(two, list):
        one, two = dict(enumerate(one)), dict(enumerate(two))
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return [found for key in one for found in differences(one[key], two[key], f"{at}[{key!r}]")]
    same = torch.equal(one, two) if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) else one == two
    return [] if same else [at]
