"""The recipes of ``docs/bucket.md``, with the real packages, from a store that answers as S3 does.

Each recipe runs in processes of its own: clients of object stores start threads, which do not survive a fork.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.bucket import buckets, run_recipe

from bench.peers.object_store import ObjectStore

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

FOLDERS = {
    "raw_files": "photos",
    "chunks": "chunks",
    "shards": "mds",
    "tar_files": "tars",
    "parquet": "parquet",
    "ray_data": "photos",
}
"""Recipe: folder of the bucket that it reads."""

PACKAGES = {
    "raw_files": ["litdata", "s3fs"],
    "chunks": ["litdata"],
    "shards": ["streaming"],
    "tar_files": ["webdataset"],
    "parquet": ["datasets", "s3fs"],
    "ray_data": ["ray.data"],
}
"""Recipe: packages that it needs."""

STATEFUL = [name for name in PACKAGES if name != "ray_data"]
NUMBERS = list(range(buckets.COUNT))


def paths():
    root = Path(__file__).parents[2]
    return os.pathsep.join([str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("buckets")
    with ObjectStore(folder, stalled=buckets.STALLED) as store:
        store.folder = folder
        yield store


@pytest.fixture
def run(store, tmp_path):
    def run(recipe, mode, workers, ranks=1):
        """Return the results of the ranks that have ended by themselves."""
        for package in PACKAGES[recipe]:
            pytest.importorskip(package)
        environment = {**os.environ, **store.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths()}
        kind = FOLDERS[recipe]
        if not (store.folder / "stalled" / kind).exists():
            command = [sys.executable, "-m", "support.bucket.buckets", str(store.folder), kind]
            subprocess.run(command, env=environment, check=True, timeout=200, capture_output=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [run_recipe.__file__, recipe, mode, str(workers), str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("?.json"))]
        assert results, done.stderr[-4000:]
        return results

    return run


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("recipe", STATEFUL)
def test_two_ranks_share_each_epoch_and_resume_at_every_batch(recipe, workers, run):
    results = run(recipe, "resume", workers, ranks=2)
    assert [result["error"] for result in results if "error" in result] == []
    assert len(results) == 2
    for epoch in range(run_recipe.EPOCHS):
        batches = [batch for result in results for batch in result["epochs"][epoch]]
        numbers = [number for batch in batches for number in batch["numbers"]]
        assert [label for batch in batches for label in batch["labels"]] == [number % 2 for number in numbers]
        if recipe == "chunks":  # the last batches of the ranks are left out
            assert len(set(numbers)) == len(numbers) >= buckets.COUNT - 2 * run_recipe.BATCH_SIZE
            assert len({len(result["epochs"][epoch]) for result in results}) == 1
        else:
            assert sorted(numbers) == NUMBERS
    orders = [[batch["numbers"] for batch in epoch] for epoch in results[0]["epochs"]]
    assert len(set(map(str, orders))) == run_recipe.EPOCHS, "each epoch has an order of its own"
    for result in results:
        assert result["slot_batches"] > 0
        counts = list(enumerate(map(len, result["epochs"])))
        last = [[epoch, count - 1] for epoch, count in counts]
        ends = [[epoch, count] for epoch, count in counts[:-1]]  # nothing is left to read after the last of them
        assert result["inexact"] == {"chunks": last, "shards": ends}.get(recipe, [])


def test_two_ranks_share_each_epoch_of_ray(run):
    (result,) = run("ray_data", "ranks", 0)
    assert result.get("error") is None
    for first, second in zip(*result["ranks"], strict=True):
        assert sorted(first + second) == NUMBERS
        assert len(first) == len(second)
    assert len(set(map(str, result["ranks"][0]))) == run_recipe.EPOCHS


@pytest.mark.parametrize("recipe", list(PACKAGES))
def test_broken_objects_are_replaced_and_counted(recipe, run):
    (result,) = run(recipe, "broken", 0 if recipe == "ray_data" else 2)
    assert result.get("error") is None
    assert result["replaced"] == run_recipe.EPOCHS
    assert result["slot_batches"] > 0
    for epoch in result["epochs"]:
        numbers = [number for batch in epoch for number in batch["numbers"]]
        assert set(numbers) == {*NUMBERS} - {buckets.BROKEN}


MESSAGES = {
    "raw_files": r"TimeoutError: .*Batch download timed out after 5\.0s",
    "chunks": r"DataLoader timed out after 10 seconds",
    "shards": r"DataLoader timed out after 10 seconds",
    "tar_files": r"stalled/tars/001\.tar",
    "parquet": r"DataLoader timed out after 10 seconds",
}


@pytest.mark.parametrize("recipe", STATEFUL)
def test_store_that_stalls_is_named_within_the_timeout(recipe, run):
    (result,) = run(recipe, "stalled", 2)
    assert re.search(MESSAGES[recipe], result["error"], re.DOTALL), result["error"]
