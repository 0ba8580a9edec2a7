"""The table of Kornia's modules in docs/fuse.md, made of the ops and of their cases.

To write it into the page: ``PYTHONPATH=tests:. python -m support.ops.documented``. The second column is the paragraph
"Pass type:" of the docstring of the op, or of its nearest base class that has one. Modules whose columns are equal share a row.
"""

import inspect
import re
from pathlib import Path

from support.ops.op_cases import CASES

from gpuaug.fusion.lower.kornia import LOWERED
from gpuaug.fusion.ops.base import ChannelOp

PAGE = Path(__file__).parents[3] / "docs" / "fuse.md"
TABLE = re.compile(r"^\| modules \| operation in a pass .*\n(?:\|.*\n)+", re.MULTILINE)
OF_OTHERS = """\
| containers of `RandomCutMixV2` and `RandomMixUpV2` with `random_apply` | one of the mixes, [picked by weight](#mixing) \
| as the picked mix |
| `RandAugment`, `TrivialAugment`, `AutoAugment` | per pick one warp, one filter of each type, and pointwise operations, \
[see below](#policies) | as the operations |
"""
"""Rows of containers and policies, which are made of other ops."""


def operation(op):
    """The paragraph "Pass type:" in the docstring of a class, or of its nearest base class with such a paragraph."""
    docstrings = (inspect.cleandoc(kind.__doc__ or "") for kind in op.__mro__)
    return next(found[1] for text in docstrings if (found := re.search(r"^Pass type: (.*)\.$", text, re.MULTILINE)))


def generated():
    """The table, with its header."""
    names = {}
    for kind, op in LOWERED.items():
        columns = operation(op), "none: bit for bit" if CASES[kind].exact else "within a tolerance"
        names.setdefault(columns, []).append(f"`{kind.__name__}`" + "¹" * issubclass(op, ChannelOp))
    rows = [f"| {', '.join(group)} | {' | '.join(columns)} |\n" for columns, group in names.items()]
    return "".join(["| modules | operation in a pass | difference from Kornia |\n|---|---|---|\n", *rows, OF_OTHERS])


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda found: generated(), PAGE.read_text()))
