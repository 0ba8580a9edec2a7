"""Run a recipe of ``docs/bucket.md``, in a process of its own: ``run_recipe.py RECIPE MODE WORKERS RESULT``.

Modes: ``resume``, ``broken``, ``stalled`` and, for Ray Data, ``ranks``. Writes a JSON file per rank into the folder RESULT.
"""

import copy
import itertools
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import gpuaug

PAGE = Path(__file__).parents[3] / "docs" / "bucket.md"
BATCH_SIZE, EPOCHS = 4, 3
numbers_of_caches = itertools.count()


def names_of(recipe, bucket, **arguments):
    """Return the names of the page after its common code and the code of a recipe.

    ``files`` is the loader of the recipe, ``loops`` the code of its loops.
    """
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names = {"__name__": "__main__"}
    exec(compile(blocks[0], str(PAGE), "exec"), names)
    names |= {"bucket": f"s3://{bucket}", "batch_size": BATCH_SIZE, "cache": cache_of(recipe)}
    names["endpoint"] = os.environ["AWS_ENDPOINT_URL"]
    block = next(block for block in blocks if f"def {recipe}(" in block)
    exec(compile(block, str(PAGE), "exec"), names)
    if recipe == "ray_data":
        arguments = {"shard": arguments.get("shard") or names["photos"]().iterator()}
    names["files"] = names[recipe](**arguments)
    names["loops"] = [block for block in blocks if f"({recipe}(" in block]
    return names


def cache_of(recipe):
    """Return a folder that the ranks share. LitData refuses a state from another folder, MosaicML a folder that is in use."""
    return f"{sys.argv[4]}/cache-{next(numbers_of_caches) if recipe == 'shards' else 0}"


def streamed(recipe, bucket, **arguments):
    """Return the ``StreamedLoader`` of a recipe, with random numbers in the images."""

    def noise(images):
        return images + 1e-3 * torch.rand_like(images)

    names = names_of(recipe, bucket, **arguments)
    return gpuaug.StreamedLoader(names["files"], [*names["stages"], noise], seed=7, device="cpu", feed="ring")


def read(loader, states=None):
    """Return, per batch of an epoch, the numbers of its photographs, its labels and the sum of its values.

    Appends the state after each batch, and after the epoch, to ``states``.
    """
    batches = []
    for images, labels in loader:
        numbers = (images.mean((1, 2, 3)) * 25.5).round().int().tolist()
        batches.append({"numbers": numbers, "labels": labels.tolist(), "sum": images.double().sum().item()})
        if states is not None:
            states.append(copy.deepcopy(loader.state_dict()))
    if states is not None:
        states.append(copy.deepcopy(loader.state_dict()))
    return batches


def read_epochs(loader, first=0, states=None):
    """Return the batches of the epochs from ``first`` on."""
    epochs = []
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        epochs.append(read(loader, states))
    loader.close()
    return epochs


def inexact_positions(recipe, bucket, workers, epochs, states):
    """Return the positions (epoch, batch) after whose states the remaining batches differ.

    ``batch`` is the number of batches for the state that was read after the epoch.
    """
    positions, states = [], iter(states)
    for epoch, batches in enumerate(epochs):
        for batch in range(len(batches) + 1):
            resumed = streamed(recipe, bucket, workers=workers)
            resumed.load_state_dict(next(states))
            ended = batch == len(batches)
            rest = read_epochs(resumed, epoch + ended)
            if rest != [*([] if ended else [batches[batch + 1 :]]), *epochs[epoch + 1 :]]:
                positions.append([epoch, batch])
    return positions


def shards_of_ray():
    """Return (numbers of the photographs of two ranks, per rank and epoch), read in two threads as Ray's shards require."""
    shards = names_of("ray_data", "whole")["photos"]().streaming_split(2, equal=True)

    def read_rank(rank):
        loader = streamed("ray_data", "whole", shard=shards[rank])
        return [[number for batch in epoch for number in batch["numbers"]] for epoch in read_epochs(loader)]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(read_rank, range(2)))


def main():
    recipe, mode, workers, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    if os.environ["WORLD_SIZE"] != "1":
        torch.distributed.init_process_group("gloo")
    if recipe in ("raw_files", "chunks"):
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # the store of the tests has no certificate
    if recipe == "parquet":
        import datasets

        datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.1  # of 5 s, at the end of each reading
    result = {}
    try:
        if mode == "ranks":
            result["ranks"] = shards_of_ray()
            return
        bucket = "whole" if mode == "resume" else mode
        loader = streamed(recipe, bucket, workers=workers, **({"timeout": 10} if mode == "stalled" else {}))
        states = [] if mode == "resume" else None
        result["epochs"] = read_epochs(loader, states=states)
        result["replaced"] = loader.stats().replaced
        result["slot_batches"] = loader.stats().slot_batches
        if mode == "broken":
            names = names_of(recipe, bucket, workers=workers)
            for loop in names["loops"]:
                exec(compile(loop, str(PAGE), "exec"), names)
        if states is not None:
            result["inexact"] = inexact_positions(recipe, bucket, workers, result["epochs"], states)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
        if recipe == "ray_data":
            import ray

            ray.shutdown()  # its processes would outlive this one
        # Not sys.exit(): clients that wait for the store do not end. After an error torchrun ends ranks that wait for this.
        os._exit("error" in result and int(os.environ["WORLD_SIZE"]) > 1)


if __name__ == "__main__":
    main()
