"""Program that runs scripts in forked processes, so that they share one import of torch and gpuaug.

Reads one request per line of standard input, as JSON. Writes the process number of each script, and its exit code at its end.
"""

import gc
import json
import os
import sys
import tempfile
import warnings

import kornia.augmentation  # noqa: F401
import numpy.random  # noqa: F401
import torch.utils.data


def import_gpuaug():
    """Import gpuaug, for the first time in this process, and return a description of the import."""
    modules, stderr = set(sys.modules), os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                import gpuaug  # noqa: F401
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
        file.seek(0)
        text = file.read().decode()
    return {
        "modules": sorted(set(sys.modules) - modules),
        "cuda": torch.cuda.is_initialized(),
        "hardware_queues": os.environ["CUDA_DEVICE_MAX_CONNECTIONS"],
        "stderr": text,
    }


IMPORT = import_gpuaug()
"""Modules that ``import gpuaug`` has added, its text on standard error, and what it has changed. Scripts can read it."""


def received_script():
    """Return the source of a script, in the process that is to run it."""
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if not process:
            redirect(request)
            return request["script"]
        print(process, flush=True)  # noqa: T201
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)  # noqa: T201
    sys.exit()


def redirect(request):
    """Set the standard streams, the environment and the working directory of the process."""
    writing = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, (path, flags) in enumerate(((os.devnull, os.O_RDONLY), (request["out"], writing), (request["err"], writing))):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    # In the namespace of __main__, whose objects live until the interpreter ends, as those of a script.
    exec(received_script())
