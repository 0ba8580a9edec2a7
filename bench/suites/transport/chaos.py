"""Loops with random delays, breaks, errors, kills and resumes, each compared bit for bit with depth=0.

    python -m bench chaos                              10 000 trials
    python -m bench chaos --processes 8                eight at a time
    python -m bench chaos --trials 200 --seed 7        fewer, and others
    python -m bench chaos --seed 7 --trial 123         one of them again, with its settings

Ctrl-C ends it with a report on the trials made so far.

Every trial draws from its own seed: a source (a list, a generator, ``DataLoader`` workers with the ring, a
``StatefulDataLoader``, encoded images), stages, a depth, and a fault with its batch. Delays are random too: of samples in
workers and generators, of stages, of decoding threads and of the training loop on the host; on a GPU also of the copy lane, of
each stage's lane and of the stream that trains. The delivered batches must equal, bit for bit, those of a loader with
``depth=0`` and without delays. Each sample must come exactly once and in order, by its index and by a checksum that the host
took before.
"""

import faulthandler
import os
import random
import signal
import threading
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from itertools import islice, repeat
from multiprocessing import get_context
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import gpuaug
from bench.data.chaotic_loaders import Planted, Samples, Trial, checksum, loader, on_host, reference, stages
from bench.harness import flags, measurement
from bench.harness.console import console
from gpuaug.benchkit.environment import environment
from gpuaug.decode.decoders import cpu  # there is no public way to delay its threads

LOOKS_S = 0.1
"""Seconds between a ``DataLoader``'s checks that its workers live; by default five."""

SHARE = 5
"""Number of trials in a chunk, the unit that a process takes."""

SAID_EVERY = 50
"""Number of chunks between two reports of the progress."""

HANG_S = 120.0
"""Seconds after which a trial counts as hanging: the tracebacks of all threads are printed, and the run ends."""


class Received:
    """The batches that a training loop received: read while lanes go on; some are kept and read at the end only."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._batches: list[dict[str, Any]] = []

    def __call__(self, batch: dict[str, Any]) -> None:
        self._trial.pause("loop")
        self._trial.stall()
        self._batches.append(batch if random.random() < 0.3 else on_host(batch))

    def read(self, batches: Any, count: int | None = None) -> None:
        for batch in islice(batches, count):
            self(batch)

    def check(self, want: Sequence[dict[str, Any]], *, whole: bool = True) -> None:
        """Compare batches with the reference, and each sample with its checksum on the host."""
        got = [on_host(batch) for batch in self._batches]
        if len(got) > len(want) or (whole and len(got) != len(want)):
            raise AssertionError(f"{len(got)} batches were delivered, of {len(want)}")
        for number, (left, right) in enumerate(zip(got, want, strict=False)):
            if left.keys() != right.keys():
                raise AssertionError(f"batch {number} has {sorted(left)}, and depth=0 {sorted(right)}")
            for name, value in right.items():
                if not torch.equal(left[name], value):
                    raise AssertionError(f"{name} of batch {number} differ from those of depth=0")
        delivered = [index for batch in got for index in batch["index"].tolist()]
        if delivered != list(range(min(len(got) * self._trial.batch_size, self._trial.count))):
            raise AssertionError(f"samples {delivered} were delivered, of {self._trial.count}")
        samples = Samples(self._trial)
        for batch in got:
            images = batch["images"]
            if self._trial.encoded:  # one flat buffer of adjacent images (h, w, C)
                images = images.view(len(batch["index"]), *samples.image(0).permute(1, 2, 0).shape).permute(0, 3, 1, 2)
            for index, image, known in zip(batch["index"].tolist(), images, batch["sum"].tolist(), strict=True):
                if not checksum(image) == known == checksum(samples.image(index)):
                    raise AssertionError(f"the checksum of sample {index} is not that of its image")


def run(trial: Trial) -> None:
    """Run one trial.

    Raises:
        AssertionError: If a sample was lost, repeated or changed, or a fault did not raise the expected error.
    """
    random.seed(f"{trial.seed}/{trial.number}")
    want = reference(trial, trial.epoch)
    first = Received(trial)
    then = Received(trial)
    faulty = trial.fault if trial.fault in ("dataset", "kill") else None
    samples = Samples(trial, faulty)
    streamed = loader(trial, samples, failing=trial.fault == "stage")
    with streamed, ExitStack() as stack:
        if trial.encoded and trial.delayed["decoding"]:
            stack.enter_context(mock.patch.object(cpu, "decode", _slowed(trial, cpu.decode)))
        match trial.fault:
            case "none":
                first.read(streamed)
                first.check(want)
            case "break":
                first.read(streamed, trial.at + 1)
                first.check(want[: trial.at + 1])
            case "close":
                batches = iter(streamed)
                first.read(batches, trial.at + 1)
                first.check(want[: trial.at + 1])
                streamed.close()
                with suppress(gpuaug.IteratorEndedError, StopIteration):
                    first.read(batches, trial.depth)  # batches that had been launched
                    next(batches)
                    raise AssertionError("a batch came that had not been launched when the loader was closed")
                first.check(want, whole=False)
            case "dataset" | "stage":
                with suppress(Planted):
                    first.read(streamed)
                    raise AssertionError("an error was lost")
                first.check(want[: trial.at])
            case "kill":
                try:
                    first.read(streamed)
                except (OSError, EOFError):
                    pass  # the DataLoader's queue fetches shared memory from its dead worker
                except RuntimeError as error:
                    if "killed by signal" not in str(error) and "exited unexpectedly" not in str(error):
                        raise
                else:
                    raise AssertionError("the death of a worker was lost")
                first.check(want[: trial.at], whole=False)
            case "resume":
                first.read(streamed, trial.at + 1)
                state = streamed.state_dict()
                streamed.close()
                streamed = stack.enter_context(loader(trial, Samples(trial)))
                streamed.load_state_dict(state)
                first.read(streamed)
                first.check(want)
            case "interleaved":
                _interleave(streamed, first, then)
                first.check(want)
                then.check(reference(trial, trial.epoch + 1))
        if trial.fault in ("break", "close", "dataset", "kill", "stage"):
            samples.fault = None
            streamed.set_epoch(trial.epoch)
            if trial.fault == "stage":
                streamed.stages = stages(trial, False)
            then.read(streamed)
            then.check(want)


def _interleave(streamed: gpuaug.StreamedLoader, *both: Received) -> None:
    iterators = [iter(streamed) for _ in both]
    left = [0, 1]
    first = True
    while left:
        which = 0 if first else random.choice(left)  # the first iterator to begin has the epoch
        first = False
        try:
            both[which](next(iterators[which]))
        except StopIteration:
            left.remove(which)


def _slowed(trial: Trial, decode: Any) -> Any:
    def slowed(*args: Any) -> Any:
        trial.pause("decoding")
        return decode(*args)

    return slowed


def _hangs(trial: Trial) -> None:
    print(f"chaos: trial {trial.number} of seed {trial.seed} hangs: {trial}", flush=True)
    faulthandler.dump_traceback()
    os._exit(1)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("chaos", __doc__, batch="1", repeats=1)
    parser.add_argument("--trials", type=int, default=10_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all trials (default: %(default)s)")
    parser.add_argument("--trial", type=int, metavar="N", help="run this one alone")
    parser.add_argument("--processes", type=int, default=1, help="that share the trials (default: %(default)s)")
    options = flags.read(parser, argv)
    found_environment = environment(options.device)
    start = perf_counter()
    numbers = range(options.trials) if options.trial is None else range(options.trial, options.trial + 1)
    shares = [numbers[first : first + SHARE] for first in range(0, len(numbers), SHARE)]
    parts: list[tuple[Counter[str], Counter[str], list[int]]] = []
    with ExitStack() as stack:
        if options.processes == 1:
            made_parts = map(_trials, repeat(options), shares)
        else:
            # Only this process handles Ctrl-C: the others finish their trials.
            ignoring = (signal.SIGINT, signal.SIG_IGN)
            pool = ProcessPoolExecutor(options.processes, get_context("spawn"), signal.signal, ignoring)
            stack.callback(pool.shutdown, cancel_futures=True)
            made_parts = pool.map(_trials, repeat(options), shares)
        try:
            for part in made_parts:
                parts.append(part)
                if len(parts) % SAID_EVERY == 0:
                    done = sum(each[0].total() for each in parts)
                    wrong = sum(len(each[2]) for each in parts)
                    console.print(f"chaos: {done} trials, {wrong} failed, {perf_counter() - start:.0f} s", markup=False)
        except KeyboardInterrupt:
            if not parts:
                raise
    counts, seconds = sum((part[0] for part in parts), Counter[str]()), sum((part[1] for part in parts), Counter[str]())
    rows = [{"name": fault, "trials": counts[fault], "took_s": seconds[fault]} for fault in counts]
    failed = sorted(number for part in parts for number in part[2])
    made = measurement.finish("chaos", options, rows, {"failed": failed}, found_environment, start)
    if failed:
        count = sum(row["trials"] for row in rows)
        raise SystemExit(
            f"The suite failed, because {len(failed)} of {count} trials differ from depth=0: "
            f"{', '.join(map(str, failed[:20]))}. "
            f"Run one again with --seed {options.seed} --trial {failed[0]}."
        )
    return made


def _trials(options: Namespace, numbers: Sequence[int]) -> tuple[Counter[str], Counter[str], list[int]]:
    """(number of trials and seconds by fault, numbers of the trials that failed)."""
    counts, seconds, failed = Counter[str](), Counter[str](), list[int]()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mock.patch.object(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (LOOKS_S,)):
            for number in numbers:
                trial = Trial(options.seed, number, options.device)
                start = perf_counter()
                if options.trial is not None:
                    console.print(f"chaos: trial {number}: {trial}", markup=False)
                if not _passes(trial):
                    failed.append(number)
                counts[trial.fault] += 1
                seconds[trial.fault] += perf_counter() - start
    finally:
        torch.set_num_threads(threads)
    return counts, seconds, failed


def _passes(trial: Trial) -> bool:
    alarm = threading.Timer(HANG_S, _hangs, [trial])
    alarm.daemon = True
    alarm.start()
    try:
        run(trial)
    except Exception:
        console.print(f"chaos: trial {trial.number} failed: {trial}\n{traceback.format_exc()}", markup=False)
        console.print(f"chaos: once more: python -m bench chaos --seed {trial.seed} --trial {trial.number}", markup=False)
        return False
    finally:
        alarm.cancel()
    return True
