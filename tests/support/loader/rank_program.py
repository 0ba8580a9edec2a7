"""A training loop of several ranks over gloo: a rank that fails, and checkpoints that a later run resumes.

``torchrun`` starts :func:`train` per rank when this module is run as a program; ``in_forks`` starts ranks as forks of a script.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from support.process.waiting import WAIT_S
from support.process.waiting import until as wait_until
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gpuaug

COUNT, TIMEOUT_S, GRACE_S = 24, 2, 10
"""Number of samples; ``timeout`` of the process group; seconds from then to the end of a rank."""


def noise(values):
    return values + torch.rand_like(values)


def loader_of(device, workers):
    dataset = TensorDataset(torch.arange(float(COUNT)))
    sampler = DistributedSampler(dataset, seed=3)
    files = DataLoader(dataset, 2, sampler=sampler, num_workers=workers)
    return gpuaug.StreamedLoader(files, [gpuaug.TransformStage(noise, on=0)], seed=5, device=device)


def fail(fault):
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep({"slow": TIMEOUT_S + 1, "hangs": 10 * (TIMEOUT_S + GRACE_S)}[fault])


def train(folder, *, fault=None, meet="all_reduce", steps=None, strict=True, attempt=0, workers=1, device="cpu"):
    """Train for two epochs, and save after each step the state of each rank, and the values that it has received.

    Args:
        folder: Folder of the checkpoint, from which a run continues, and of the values of each rank.
        fault: Failure of the last rank at its third step of the first attempt; ``None`` without one.
        meet: Collective call by which ranks wait for each other at each step.
        steps: Number of steps after which the run is stopped.
        strict, workers, device: Arguments of the loader and of ``load_state_dict``.
        attempt: Number of the attempt.
    """
    folder, rank, ranks = Path(folder), dist.get_rank(), dist.get_world_size()
    checkpoint, log = folder / "checkpoint.pt", (folder / f"values of {rank} of {ranks}").open("a")
    loader, first = loader_of(device, workers), 0
    done = 0
    if checkpoint.exists():
        states = torch.load(checkpoint, weights_only=True)
        first = states[0]["epoch"]
        loader.load_state_dict(states[rank % len(states)], strict=strict)
    for epoch in range(first, 2):
        loader.set_epoch(epoch)
        for (values,) in loader:
            workers_of_rank = [child.pid for child in multiprocessing.active_children()]
            (folder / f"workers of {rank}").write_text(json.dumps(workers_of_rank))
            if fault is not None and rank == ranks - 1 and done == 2 and attempt == 0:
                (folder / "fault").touch()
                fail(fault)
            if meet == "all_reduce":
                dist.all_reduce(torch.ones(1))
            else:
                dist.monitored_barrier(timeout=timedelta(seconds=TIMEOUT_S))
            states = [None] * ranks
            dist.all_gather_object(states, loader.state_dict())
            state = loader.state_dict()
            log.write(json.dumps([state["epoch"], state["batch"], values.tolist()]) + "\n")
            log.flush()
            if rank == 0:
                torch.save(states, folder / "new")
                (folder / "new").replace(checkpoint)
            done += 1
            if done == steps:
                return


def received(folder, rank, ranks):
    """(epoch, batch) → values that a rank has received last."""
    lines = Path(folder, f"values of {rank} of {ranks}").read_text().splitlines()
    return {(epoch, batch): values for epoch, batch, values in map(json.loads, lines)}


def in_forks(folder, ranks, **options):
    """Run ``train`` in forks of this process. Print JSON: the exit codes and the errors of the ranks."""
    folder = Path(folder)
    start = str(folder / f"group {time.monotonic_ns()}")

    def run(rank, errors):
        try:
            timeout = timedelta(seconds=TIMEOUT_S)
            dist.init_process_group("gloo", init_method=f"file://{start}", rank=rank, world_size=ranks, timeout=timeout)
            train(folder, **options)
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            Path(errors).write_text(traceback.format_exc())
            raise

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run, args=(rank, f"{start} {rank}")) for rank in range(ranks)]
    for process in processes:
        process.start()
    if options.get("fault") is not None:
        wait_until((folder / "fault").exists)
    ended = []
    for process in processes:  # the first ones end by themselves; the last one may hang
        process.join(TIMEOUT_S + GRACE_S if options.get("fault") is not None else WAIT_S)
        ended.append(process.exitcode)
        if ended[0] is not None and options.get("fault") == "hangs":
            processes[-1].kill()
    for process in processes:
        process.kill()
        process.join()
    wait_until(lambda: not any(is_running(pid) for rank in range(ranks) for pid in workers_of(folder, rank)))
    texts = [Path(f"{start} {rank}") for rank in range(ranks)]
    sys.stdout.write(json.dumps([ended, [text.read_text() if text.exists() else "" for text in texts]]) + "\n")


def workers_of(folder, rank):
    path = folder / f"workers of {rank}"
    return json.loads(path.read_text()) if path.exists() else []


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    train(sys.argv[1], **json.loads(sys.argv[2]), attempt=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.destroy_process_group()
