"""Print the description of this machine that results contain, as JSON: hardware, versions, commit."""

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

import torch

from gpuaug.benchkit.environment import environment


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ArgumentParser(prog="python -m bench env", description=__doc__)
    parser.add_argument("--device", type=torch.device, help="default: the GPU if there is one, else the CPU")
    device = parser.parse_args(argv).device
    description = environment(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(json.dumps(description, indent=2, sort_keys=True))
    return description
