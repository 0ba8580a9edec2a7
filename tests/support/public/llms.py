"""``docs/llms.txt``: the interface and the pages of the documentation in one file, for language models.

``PYTHONPATH=tests:. python -m support.public.llms`` writes it again.
"""

import inspect
import re
from pathlib import Path

import gpuaug

ROOT = Path(__file__).parents[3]
FILE = ROOT / "docs" / "llms.txt"

MIGRATION = {
    "StreamedLoader": "migrate.md",
    "DecodeStage": "files.md",
    "TransformStage": "stages.md",
    "fuse": "torchvision.md",
    "FeatureStage": "encoders.md",
}
"""Names in the order in which a training script adopts them, with the page about each. All other names follow."""

BEFORE = """\
1. `torch.utils.data.DataLoader`: it stays, with its data set, sampler and workers. Remove `pin_memory`, and the copies in the
   loop. For image files, let workers only read: `ImageFolder(root, loader=gpuaug.read_encoded)` and
   `collate_fn=gpuaug.collate_encoded`."""


def text():
    """The content of the file."""
    site = re.search(r"^site_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)[1]
    signatures = dict(line.split(": ", 1) for line in (ROOT / "tests/project/api.txt").read_text().splitlines())
    intro = (ROOT / "docs" / "index.md").read_text().split("\n\n")[1].replace("\n", " ")
    parts = [f"# gpuaug {gpuaug.__version__}", f"> {intro}", "## From a DataLoader, in this order", migration(site, signatures)]
    rest = [name for name in documented_names() if name not in MIGRATION]
    parts += ["## Other names of `gpuaug`", "\n".join(entry(name, signatures) for name in rest)]
    parts += ["## Pages", "\n".join(pages(site))]
    return "\n\n".join(parts) + "\n"


def migration(site, signatures):
    """A numbered list of the names of ``MIGRATION``."""
    entries = [
        f"{number}. {entry(name, signatures).removeprefix('- ')} [Page]({address(site, page)})"
        for number, (name, page) in enumerate(MIGRATION.items(), 2)
    ]
    return "\n".join([BEFORE, *entries])


def entry(name, signatures):
    """A line about a public name: the signature, its public members, and the first sentence of its docstring."""
    signature = signatures[name]
    call = f"`{name}{signature}`" if signature.startswith("(") else f"`{name}` ({signature})"
    members = [key.partition(".")[2] for key in signatures if key.startswith(f"{name}.")]
    also = f" Members: {', '.join(f'`{member}`' for member in members)}." if members else ""
    summary = inspect.getdoc(getattr(gpuaug, name)).partition("\n\n")[0].replace("\n", " ").replace("``", "`")
    return f"- {call}: {summary}{also}"


def documented_names():
    """Public names in the order of ``docs/api.md``."""
    return re.findall(r"^::: gpuaug\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)


def pages(site):
    """A line per page of the navigation."""
    for title, page in re.findall(r"^ +- (?:(.*): )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE):
        yield f"- [{title or 'Overview'}]({address(site, page)})"


def address(site, page):
    """Address of a page on the site of the documentation."""
    return site if page == "index.md" else f"{site}{page.removesuffix('.md')}/"


if __name__ == "__main__":
    FILE.write_text(text())
