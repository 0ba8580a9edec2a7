"""Program that runs scripts in forked processes, so that they share one import of torch and gpuaug.

Reads one request per line of standard input, as JSON. Writes the process number of each script, and its exit code at its end.
"""

import gc
import json
import os
import sys

import kornia.augmentation  # noqa: F401
import torch.utils.data  # noqa: F401

import gpuaug  # noqa: F401


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
