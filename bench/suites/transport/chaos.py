"""Loops with random delays, breaks, errors, kills and resumes, each compared bit for bit with depth=0.

    python -m bench chaos                              10 000 trials
    python -m bench chaos --processes 8                eight at a time
    python -m bench chaos --trials 200 --seed 7        fewer, and others
    python -m bench chaos --seed 7 --trial 123         one of them again, with its settings

Ctrl-C ends the run with a report on the trials so far.

Every trial has a seed, from which it draws a source (a list, a generator, ``DataLoader`` workers with the ring, a
``StatefulDataLoader``), images or encoded images, stages, a depth, and a fault with the batch at which it happens. Delays are
random too: on the host of samples in workers and generators, stages, decoding threads and the training loop; on a GPU also of
the copy lane, the lane of each stage and the training stream. The delivered batches must equal, bit for bit, those of a loader
with ``depth=0`` and without delays. Each sample must come exactly once and in order, by its index and by a checksum that was
computed on the host.
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
from bench.data.chaotic_loaders import PlantedError, Samples, Trial, checksum, loader, on_host, reference, stages
from bench.harness import flags, measurement
from bench.harness.console import console
from gpuaug.benchkit.environment import environment
from gpuaug.decode.decoders import cpu  # no public API can delay its threads

POLL_S = 0.1
"""Seconds between two checks of a ``DataLoader`` that its workers are alive. PyTorch's value is 5."""

CHUNK_TRIALS = 5
"""Number of trials in a chunk, the unit of work of a process."""

CHUNKS_PER_REPORT = 50
"""Number of chunks between two progress messages."""

HANG_S = 120.0
"""Seconds after which a trial counts as hanging. Then the tracebacks of all threads are printed, and the run ends."""


class ReceivedBatches:
    """Batches that a training loop received. Most are copied to the host at once, while lanes go on; 30 % only in ``check``."""

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

    def check(self, expected: Sequence[dict[str, Any]], *, complete: bool = True) -> None:
        """Compare the batches with ``expected``, and each image with its checksum. ``complete``: no batch may be missing."""
        delivered = [on_host(batch) for batch in self._batches]
        if len(delivered) > len(expected) or (complete and len(delivered) != len(expected)):
            raise AssertionError(f"{len(delivered)} batches were delivered, of {len(expected)}")
        for number, (delivered_batch, expected_batch) in enumerate(zip(delivered, expected, strict=False)):
            if delivered_batch.keys() != expected_batch.keys():
                raise AssertionError(f"batch {number} has {sorted(delivered_batch)}, and depth=0 {sorted(expected_batch)}")
            for name, value in expected_batch.items():
                if not torch.equal(delivered_batch[name], value):
                    raise AssertionError(f"{name} of batch {number} differ from those of depth=0")
        indices = [index for batch in delivered for index in batch["index"].tolist()]
        if indices != list(range(min(len(delivered) * self._trial.batch_size, self._trial.count))):
            raise AssertionError(f"samples {indices} were delivered, of {self._trial.count}")
        samples = Samples(self._trial)
        for batch in delivered:
            images = batch["images"]
            if self._trial.encoded:  # one flat buffer of images (H, W, C)
                images = images.view(len(batch["index"]), *samples.image(0).permute(1, 2, 0).shape).permute(0, 3, 1, 2)
            for index, image, host_sum in zip(batch["index"].tolist(), images, batch["sum"].tolist(), strict=True):
                if not checksum(image) == host_sum == checksum(samples.image(index)):
                    raise AssertionError(f"the checksum of sample {index} is not that of its image")


def run(trial: Trial) -> None:
    """Run one trial.

    Raises:
        AssertionError: If a sample was lost, repeated or changed, or a fault did not raise the expected error.
    """
    random.seed(f"{trial.seed}/{trial.number}")
    expected = reference(trial, trial.epoch)
    first_epoch = ReceivedBatches(trial)
    second_epoch = ReceivedBatches(trial)
    faulty = trial.fault if trial.fault in ("dataset", "kill") else None
    samples = Samples(trial, faulty)
    streamed = loader(trial, samples, raises=trial.fault == "stage")
    with streamed, ExitStack() as stack:
        if trial.encoded and trial.delayed["decoding"]:
            stack.enter_context(mock.patch.object(cpu, "decode", _delayed(trial, cpu.decode)))
        match trial.fault:
            case "none":
                first_epoch.read(streamed)
                first_epoch.check(expected)
            case "break":
                first_epoch.read(streamed, trial.fault_batch + 1)
                first_epoch.check(expected[: trial.fault_batch + 1])
            case "close":
                batches = iter(streamed)
                first_epoch.read(batches, trial.fault_batch + 1)
                first_epoch.check(expected[: trial.fault_batch + 1])
                streamed.close()
                with suppress(gpuaug.IteratorEndedError, StopIteration):
                    first_epoch.read(batches, trial.depth)  # batches that were launched before close()
                    next(batches)
                    raise AssertionError("a batch came that had not been launched when the loader was closed")
                first_epoch.check(expected, complete=False)
            case "dataset" | "stage":
                with suppress(PlantedError):
                    first_epoch.read(streamed)
                    raise AssertionError("an error was lost")
                first_epoch.check(expected[: trial.fault_batch])
            case "kill":
                try:
                    first_epoch.read(streamed)
                except (OSError, EOFError):
                    pass  # raised by the DataLoader's queue when it fetches shared memory from its dead worker
                except RuntimeError as error:
                    if "killed by signal" not in str(error) and "exited unexpectedly" not in str(error):
                        raise
                else:
                    raise AssertionError("the death of a worker was lost")
                first_epoch.check(expected[: trial.fault_batch], complete=False)
            case "resume":
                first_epoch.read(streamed, trial.fault_batch + 1)
                state = streamed.state_dict()
                streamed.close()
                streamed = stack.enter_context(loader(trial, Samples(trial)))
                streamed.load_state_dict(state)
                first_epoch.read(streamed)
                first_epoch.check(expected)
            case "interleaved":
                _interleave(streamed, first_epoch, second_epoch)
                first_epoch.check(expected)
                second_epoch.check(reference(trial, trial.epoch + 1))
        if trial.fault in ("break", "close", "dataset", "kill", "stage"):
            samples.fault = None
            streamed.set_epoch(trial.epoch)
            if trial.fault == "stage":
                streamed.stages = stages(trial, False)
            second_epoch.read(streamed)
            second_epoch.check(expected)


def _interleave(streamed: gpuaug.StreamedLoader, *epochs: ReceivedBatches) -> None:
    iterators = [iter(streamed) for _ in epochs]
    open_iterators = [0, 1]
    nothing_pulled = True
    while open_iterators:
        # Iterators get their epochs in the order of their first next().
        index = 0 if nothing_pulled else random.choice(open_iterators)
        nothing_pulled = False
        try:
            epochs[index](next(iterators[index]))
        except StopIteration:
            open_iterators.remove(index)


def _delayed(trial: Trial, decode: Any) -> Any:
    def decode_late(*args: Any) -> Any:
        trial.pause("decoding")
        return decode(*args)

    return decode_late


def _report_hang(trial: Trial) -> None:
    print(f"chaos: trial {trial.number} of seed {trial.seed} hangs: {trial}", flush=True)
    faulthandler.dump_traceback()
    os._exit(1)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("chaos", __doc__, batch="1", repeats=1)
    parser.add_argument("--trials", type=int, default=10_000, help="number of trials (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default: %(default)s)")
    parser.add_argument("--trial", type=int, metavar="N", help="run only this trial")
    parser.add_argument("--processes", type=int, default=1, help="number of processes (default: %(default)s)")
    options = flags.parse(parser, argv)
    machine = environment(options.device)
    start = perf_counter()
    numbers = range(options.trials) if options.trial is None else range(options.trial, options.trial + 1)
    chunks = [numbers[start_trial : start_trial + CHUNK_TRIALS] for start_trial in range(0, len(numbers), CHUNK_TRIALS)]
    chunk_results: list[tuple[Counter[str], Counter[str], list[int]]] = []
    with ExitStack() as stack:
        if options.processes == 1:
            finished_chunks = map(_run_chunk, repeat(options), chunks)
        else:
            # Only this process handles Ctrl-C. Child processes finish their trials.
            ignore_sigint = (signal.SIGINT, signal.SIG_IGN)
            pool = ProcessPoolExecutor(options.processes, get_context("spawn"), signal.signal, ignore_sigint)
            stack.callback(pool.shutdown, cancel_futures=True)
            finished_chunks = pool.map(_run_chunk, repeat(options), chunks)
        try:
            for chunk_result in finished_chunks:
                chunk_results.append(chunk_result)
                if len(chunk_results) % CHUNKS_PER_REPORT == 0:
                    finished = sum(counts.total() for counts, _, _ in chunk_results)
                    failures = sum(len(failed) for _, _, failed in chunk_results)
                    console.print(f"chaos: {finished} trials, {failures} failed, {perf_counter() - start:.0f} s", markup=False)
        except KeyboardInterrupt:
            if not chunk_results:
                raise
    counts = sum((result[0] for result in chunk_results), Counter[str]())
    seconds = sum((result[1] for result in chunk_results), Counter[str]())
    rows = [{"name": fault, "trials": counts[fault], "took_s": seconds[fault]} for fault in counts]
    failed = sorted(number for _, _, numbers in chunk_results for number in numbers)
    result = measurement.finish("chaos", options, rows, {"failed": failed}, machine, start)
    if failed:
        count = sum(row["trials"] for row in rows)
        raise SystemExit(
            f"The suite failed, because {len(failed)} of {count} trials differ from depth=0: "
            f"{', '.join(map(str, failed[:20]))}. "
            f"Run one again with --seed {options.seed} --trial {failed[0]}."
        )
    return result


def _run_chunk(options: Namespace, numbers: Sequence[int]) -> tuple[Counter[str], Counter[str], list[int]]:
    """Run the trials of a chunk. Returns (number of trials per fault, seconds per fault, numbers of the failed trials)."""
    counts, seconds, failed = Counter[str](), Counter[str](), list[int]()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mock.patch.object(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (POLL_S,)):
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
    alarm = threading.Timer(HANG_S, _report_hang, [trial])
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
