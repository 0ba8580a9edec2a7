"""The listing of all messages, a file for each room, made from the source.

To approve new or changed messages, run ``PYTHONPATH=tests:. python -m support.messages.listing`` and read the difference.
"""

import functools
from collections import defaultdict

from support.messages import registry
from support.messages.finder import ROOT, sites

FOLDER = ROOT / "tests/messages/approved"
COMMAND = "PYTHONPATH=tests:. python -m support.messages.listing"


def room_of(site):
    """The room of a site, by which the listing is cut into files: ``fusion`` has one for each of its folders."""
    parts = site.where.split(":")[0].removesuffix(".py").split("/")
    return f"fusion-{parts[2]}" if parts[1] == "fusion" and len(parts) > 3 else parts[1] if parts[0] == "gpuaug" else "bench"


@functools.cache
def listed():
    """The lines of the listing of each room."""
    names, reasons = registry.covered()
    rooms = defaultdict(lambda: defaultdict(list))
    for site in sites():
        path = site.where.split(":")[0]
        head = f"{path} {site.function}".strip()
        for text in site.listed:
            entry = [f"    {site.kind}: {text}"]
            if path.startswith("gpuaug"):
                entry += [f"        example: {name}" for name in names.get(text, [])]
                if text in reasons:
                    entry.append(f"        no example: {reasons[text]}")
                elif text not in names and registry.has_code(text):
                    entry.append("        MISSING: an example of this code")
            rooms[room_of(site)][head].append("\n".join(entry))
    return {
        room: "".join(f"{head}\n" + "".join(f"{entry}\n" for entry in dict.fromkeys(heads[head])) for head in sorted(heads))
        for room, heads in rooms.items()
    }


def approve():
    """Write the listing."""
    FOLDER.mkdir(exist_ok=True)
    rooms = listed()
    for path in FOLDER.glob("*.txt"):
        if path.stem not in rooms:
            path.unlink()
    for room, text in rooms.items():
        (FOLDER / f"{room}.txt").write_text(text)


if __name__ == "__main__":
    approve()
