"""The tables of Kornia's modules in docs/fuse.md and of torchvision's transforms in docs/torchvision.md, made of the ops.

To write them into the pages: ``PYTHONPATH=tests:. python -m support.ops.documented``. A column is a paragraph of the docstring
of the op, or of its nearest base class that has one: "Pass type:" or "Support:". Classes whose columns are equal share a row.
"""

import inspect
import re
from pathlib import Path

from support.ops.op_cases import CASES

from gpuaug.fusion.lower import kornia, torchvision
from gpuaug.fusion.ops.base import ChannelOp

DOCS = Path(__file__).parents[3] / "docs"
OTHER_MODULES = """\
| containers of `RandomCutMixV2` and `RandomMixUpV2` with `random_apply` | one of the mixes, [picked by weight](#mixing) \
| as the picked mix |
| `RandAugment`, `TrivialAugment`, `AutoAugment` | per pick one warp, one filter of each type, and pointwise operations, \
[see below](#policies) | as the operations |
"""
"""Rows of containers and policies, which are made of other ops."""
OTHER_TRANSFORMS = """\
| `weights.transforms()` of models for classification, detection and segmentation | fused |
| `ToImage`, `PILToTensor`, `ToPureTensor`, `Identity`, `ToDtype(torch.float32)` with or [without](#floats-in-0-255) `scale`, \
`ConvertImageDtype`, `ToTensor` | nothing to compute; `ToDtype(torch.uint8)` of floats is run by torchvision, a `ToDtype` to \
any other type is an error |
| `Compose`, `RandomApply`, `RandomChoice`, `RandomOrder` of up to four | fused; if a crop or a resize in one of the last \
three may leave images with different sizes, it is not, except for [random sizes](#random-sizes) |
| LeRobot's `ImageTransforms`, `RandomSubsetApply`, `SharpnessJitter` | [fused](#lerobots-transforms) |
| a function or a Lambda that only calls `image.convert("RGB")` | as `RGB` |
| `Lambda`, functions (an error in a list of transforms), \
[subclasses that override a method](fuse.md#subclasses) | left to torchvision: not fused, and called image by image |
| `ClampBoundingBoxes`, `ConvertBoundingBoxFormat`, `SanitizeBoundingBoxes` | applied at the end of the pipeline: \
[Detection and segmentation](detection.md) |
| `ClampKeyPoints`, `SanitizeKeyPoints`, `SetClampingMode`, `ToPILImage` | refused: an error that names a replacement |
"""
"""Rows of transforms without an op."""


def paragraph(op, title):
    """The paragraph ``title`` in the docstring of a class, or of its nearest base class with such a paragraph, on one line."""
    docstrings = (inspect.cleandoc(kind.__doc__ or "") for kind in op.__mro__)
    pattern = re.compile(rf"^{title}: (.*?)\.$(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
    return next(" ".join(found[1].split()) for text in docstrings if (found := pattern.search(text)))


def rows(columns_by_name):
    """The rows of a table, each with all names whose other columns are equal."""
    names = {}
    for name, columns in columns_by_name.items():
        names.setdefault(columns, []).append(name)
    return "".join(f"| {', '.join(group)} | {' | '.join(columns)} |\n" for columns, group in names.items())


def modules():
    """The table of Kornia's modules, with its header."""
    columns = {
        f"`{kind.__name__}`" + "¹" * issubclass(op, ChannelOp): (
            paragraph(op, "Pass type"),
            "none: bit for bit" if CASES[kind].exact else "within a tolerance",
        )
        for kind, op in kornia.LOWERED.items()
    }
    return f"| modules | operation in a pass | difference from Kornia |\n|---|---|---|\n{rows(columns)}{OTHER_MODULES}"


def transforms():
    """The table of torchvision's transforms, with its header."""
    lowered = torchvision.LOWERED | torchvision.MIXES
    columns = {f"`{kind.__name__}`": (paragraph(op, "Support"),) for kind, op in lowered.items()}
    return f"| transform | support |\n|---|---|\n{rows(columns)}{OTHER_TRANSFORMS}"


TABLES = {DOCS / "fuse.md": modules, DOCS / "torchvision.md": transforms}
"""Function that returns the table of each page."""


def written(page):
    """The table in a page that begins with the header of the generated table."""
    header = re.escape(TABLES[page]().partition("\n")[0])
    return re.compile(rf"^{header}\n(?:\|.*\n)+", re.MULTILINE)


if __name__ == "__main__":
    for page, table in TABLES.items():
        page.write_text(written(page).sub(lambda found, table=table: table(), page.read_text()))
