"""Buckets of 22 photographs for the recipes of ``docs/bucket.md``: photograph i has the value 10 i in all pixels."""

import io
import sys
import tarfile
from pathlib import Path

from PIL import Image

COUNT = 22
BROKEN = 5
STALLED = r"^stalled/(photos/1/009\.jpg|tars/001\.tar|parquet/001\.parquet|chunks/chunk-0-1\.bin|mds/shard\.00001\.mds)"
"""Paths of the bucket ``stalled`` that the store never answers."""


def photograph(number, broken=False):
    """Bytes of a JPEG."""
    file = io.BytesIO()
    Image.new("RGB", (40 + number, 30), (10 * number,) * 3).save(file, "JPEG", quality=95)
    return file.getvalue()[: -200 if broken else None]


def samples_of(bucket):
    """(bytes of a photograph, label) of each photograph of a bucket."""
    return [(photograph(number, bucket == "broken" and number == BROKEN), number % 2) for number in range(COUNT)]


def write_files(root, samples):
    for number, (file, label) in enumerate(samples):
        path = root / str(label) / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file)


def write_tars(root, samples):
    root.mkdir()
    for shard in range(4):
        with tarfile.open(root / f"{shard:03}.tar", "w") as tar:
            for number in range(shard, COUNT, 4):
                file, label = samples[number]
                for extension, content in (("jpg", file), ("cls", str(label).encode())):
                    info = tarfile.TarInfo(f"{number:03}.{extension}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def write_parquet(root, samples):
    import datasets

    root.mkdir()
    for shard in range(4):
        rows = [
            {"image": {"bytes": samples[number][0], "path": f"{number:03}.jpg"}, "label": samples[number][1]}
            for number in range(shard, COUNT, 4)
        ]
        datasets.Dataset.from_list(rows).to_parquet(root / f"{shard:03}.parquet")


def write_chunks(root, samples):
    """Write LitData's chunks."""
    import litdata

    litdata.optimize(tuple, samples, str(root), chunk_size=5, num_workers=1)


def write_mds(root, samples):
    """Write shards of MosaicML Streaming."""
    from streaming import MDSWriter

    with MDSWriter(out=str(root), columns={"image": "bytes", "label": "int"}, size_limit=4000) as writer:
        for file, label in samples:
            writer.write({"image": file, "label": label})


WRITERS = {"photos": write_files, "tars": write_tars, "parquet": write_parquet, "chunks": write_chunks, "mds": write_mds}
"""Folder in a bucket: function that writes it."""

if __name__ == "__main__":  # in a process of its own: litdata.optimize starts processes, which import this file
    root, kind = Path(sys.argv[1]), sys.argv[2]
    for bucket in ("whole", "broken", "stalled"):
        (root / bucket).mkdir(exist_ok=True)
        WRITERS[kind](root / bucket / kind, samples_of(bucket))
