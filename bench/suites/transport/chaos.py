"""Loops with random delays, breaks, errors, kills and resumes, each compared bit for bit with depth=0.

    python -m bench chaos                              10 000 trials
    python -m bench chaos --processes 8                eight at a time
    python -m bench chaos --trials 200 --seed 7        fewer, and others
    python -m bench chaos --seed 7 --trial 123         one of them again, with its settings
    python -m bench chaos --seconds 240 --add --json chaos.json --processes 3

The last line adds the next trials of the seed, for four minutes, to those in the file. Ctrl-C ends a run with a report.

Every trial has a seed, from which it draws a source (a list, a generator, ``DataLoader`` workers with the ring, a
``StatefulDataLoader``), the form of its batches (images, encoded images, JPEG files, clips, files for an image processor of a
vision-language model, images for an encoder with a structured result, files with a feature cache), stages, a depth, a second
loader that the loop reads too, and a fault with the batch at which it happens. Delays are random too: on the host of samples in
workers and generators, stages, decoding threads and the training loop; on a GPU also of the copy lane, the lane of each stage
and the training stream. A loader with ``depth=0`` and without delays must return the same batches, bit for bit. Each sample
must come exactly once and in order, by its index and by a checksum that was computed on the host.
"""

import faulthandler
import json
import os
import random
import signal
import threading
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from itertools import islice, repeat
from multiprocessing import get_context
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import gpuaug
from bench.data.chaos.loaders import PlantedError, Samples, Trial, checksum, feature_cache, loader, on_host, reference, stages
from bench.harness import flags, measurement
from bench.harness.console import console
from gpuaug.benchkit.environment import environment
from gpuaug.decode.decoders import cpu  # no public API can delay its threads

POLL_S = 0.1
"""Seconds between two checks of a ``DataLoader`` that its workers are alive. PyTorch's value is 5."""

CHUNK_TRIALS = 5
"""Number of trials in a chunk, the unit of work of a process."""

REPORT_S = 30.0
"""Seconds between two progress messages."""

SUMS = {"counts": "trials", "seconds": "took_s"}
"""Sum of all calls → its name in a row of the result."""

HANG_S = 300.0
"""Seconds after which a trial counts as hanging. Then the tracebacks of all threads are printed, and the run ends."""


class ReceivedBatches:
    """Batches that a training loop received. Most are copied to the host at once, while lanes go on; 30 % only in ``check``."""

    def __init__(self, trial: Trial, second: "SecondLoader | None" = None) -> None:
        self._trial = trial
        self._second = second
        self.batches: list[dict[str, Any]] = []

    def __call__(self, batch: dict[str, Any]) -> None:
        self._trial.pause("loop")
        self._trial.stall()
        if self._second is not None:
            self._second.read()
        self.batches.append(batch if random.random() < 0.3 else on_host(batch))

    def read(self, batches: Any, count: int | None = None) -> None:
        for batch in islice(batches, count):
            self(batch)

    def check(self, expected: Sequence[dict[str, Any]], *, complete: bool = True) -> None:
        """Compare the batches with ``expected``, and each image with its checksum. ``complete``: no batch may be missing."""
        delivered = [on_host(batch) for batch in self.batches]
        if len(delivered) > len(expected) or (complete and len(delivered) != len(expected)):
            raise AssertionError(f"{len(delivered)} batches were delivered, of {len(expected)}")
        for number, (delivered_batch, expected_batch) in enumerate(zip(delivered, expected, strict=False)):
            names = expected_batch.keys() - {"images"} if self._trial.form == "cache" else expected_batch.keys()
            if delivered_batch.keys() - {"images"} != expected_batch.keys() - {"images"}:
                raise AssertionError(f"batch {number} has {sorted(delivered_batch)}, and depth=0 {sorted(expected_batch)}")
            for name in names:
                value = expected_batch[name]
                if not torch.equal(delivered_batch[name], value):
                    raise AssertionError(f"{name} of batch {number} differ from those of depth=0")
        indices = [index for batch in delivered for index in batch["index"].tolist()]
        if indices != list(range(min(len(delivered) * self._trial.batch_size, self._trial.count))):
            raise AssertionError(f"samples {indices} were delivered, of {self._trial.count}")
        samples = Samples(self._trial)
        for batch in delivered if self._trial.has_exact_pixels else []:
            images = batch["images"]
            if self._trial.encoded:  # one flat buffer of images (H, W, C)
                images = images.view(len(batch["index"]), *samples.image(0).permute(1, 2, 0).shape).permute(0, 3, 1, 2)
            for index, image, host_sum in zip(batch["index"].tolist(), images, batch["sum"].tolist(), strict=True):
                if not checksum(image) == host_sum == checksum(samples.image(index)):
                    raise AssertionError(f"the checksum of sample {index} is not that of its image")


class SecondLoader:
    """Another loader, without a fault. The training loop reads one batch of it at each step, until the loader ends."""

    def __init__(self, trial: Trial, stack: ExitStack) -> None:
        second = Trial(trial.seed + 1, trial.number, trial.device)
        second.fault, second.second_loader = "none", False
        self._trial = second
        self._expected = reference(second, second.epoch)
        self._received = ReceivedBatches(second)
        features = None if second.form != "cache" else feature_cache(second, stack)
        self._batches = iter(stack.enter_context(loader(second, Samples(second), cache=features)))

    def read(self) -> None:
        self._received.read(self._batches, 1)

    def check(self) -> None:
        self._received.check(self._expected, complete=False)


def run(trial: Trial) -> None:
    """Run one trial.

    Raises:
        AssertionError: If a sample was lost, repeated or changed, or a fault did not raise the expected error.
    """
    random.seed(f"{trial.seed}/{trial.number}")
    expected = reference(trial, trial.epoch)
    faulty = trial.fault if trial.fault in ("dataset", "kill") else None
    samples = Samples(trial, faulty)
    with ExitStack() as stack:
        cache = feature_cache(trial, stack) if trial.form == "cache" else None
        second = SecondLoader(trial, stack) if trial.second_loader else None
        first_epoch = ReceivedBatches(trial, second)
        second_epoch = ReceivedBatches(trial, second)
        streamed = stack.enter_context(loader(trial, samples, raises=trial.fault == "stage", cache=cache))
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
                streamed = stack.enter_context(loader(trial, Samples(trial), cache=cache))
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
        if second is not None:
            second.check()


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
    parser = flags.parser("chaos", __doc__, batch="1", repeats=1, seconds=0)
    parser.add_argument("--trials", type=int, default=10_000, help="number of trials (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default: %(default)s)")
    parser.add_argument("--trial", type=int, metavar="N", help="run only this trial")
    parser.add_argument("--processes", type=int, default=1, help="number of processes (default: %(default)s)")
    parser.add_argument("--add", action="store_true", help="add the trials to those in the file of --json")
    options = flags.parse(parser, argv)
    machine = environment(options.device)
    start = perf_counter()
    earlier = _earlier(options)
    numbers = range(earlier["next"], earlier["next"] + options.trials) if options.trial is None else [options.trial]
    chunks = [numbers[start_trial : start_trial + CHUNK_TRIALS] for start_trial in range(0, len(numbers), CHUNK_TRIALS)]
    chunk_results: list[tuple[Counter[str], Counter[str], list[int]]] = []
    problem = ""
    next_report = REPORT_S
    with ExitStack() as stack:
        try:
            for chunk_result in _finished_chunks(options, chunks, stack):
                chunk_results.append(chunk_result)
                elapsed = perf_counter() - start
                if elapsed > next_report:
                    next_report = elapsed + REPORT_S
                    finished = sum(counts.total() for counts, _, _ in chunk_results)
                    failures = sum(len(failed) for _, _, failed in chunk_results)
                    console.print(f"chaos: {finished} trials, {failures} failed, {elapsed:.0f} s", markup=False)
                if 0 < options.seconds < elapsed:
                    break
        except KeyboardInterrupt:
            if not chunk_results:
                raise
        except BrokenProcessPool:
            first = chunks[len(chunk_results)][0]
            after = first + CHUNK_TRIALS * (options.processes + 1)
            problem = f"a process ended within trials {first} to {after - 1}, which are not counted"
    added = sum((result[0] for result in chunk_results), Counter[str]())
    counts = added + earlier["counts"]
    seconds = sum((result[1] for result in chunk_results), Counter[str]()) + earlier["seconds"]
    rows = [{"name": fault, "trials": counts[fault], "took_s": seconds[fault]} for fault in counts]
    failed = sorted(number for _, _, numbers in chunk_results for number in numbers)
    runs = [*earlier["runs"], {"seed": options.seed, "trials": added.total(), "failed": failed, "problem": problem}]
    next_number = after if problem else numbers[0] + added.total()  # chunks are finished in order
    settings = {"failed": earlier["failed"] + failed, "runs": runs, "next": next_number}
    problem_message = f"The suite failed, because {problem}. Run them again, one by one, with --seed and --trial."
    if not counts:
        raise SystemExit(problem_message)
    result = measurement.finish("chaos", options, rows, settings, machine, start)
    console.print(
        f"chaos: {counts.total()} trials, {added.total()} of them now, {len(settings['failed'])} failed, {len(runs)} calls"
        + (f"; {problem}" if problem else ""),
        markup=False,
    )
    if failed:
        raise SystemExit(
            f"The suite failed, because {len(failed)} of {added.total()} trials differ from depth=0: "
            f"{', '.join(map(str, failed[:20]))}. "
            f"Run one again with --seed {options.seed} --trial {failed[0]}."
        )
    if problem:
        raise SystemExit(problem_message)
    return result


def _earlier(options: Namespace) -> dict[str, Any]:
    """Return the trials of earlier calls in the file of ``--json``, if ``--add``, and the number of the next trial."""
    if not options.add or options.json is None or not options.json.exists():
        return {**{name: Counter[str]() for name in SUMS}, "failed": [], "runs": [], "next": 0}
    result = json.loads(options.json.read_text())
    settings = result["settings"]
    if settings["seed"] != options.seed:
        raise SystemExit(f"--seed must be {settings['seed']}, as in {options.json}, got {options.seed}. Pass another file.")
    sums = {name: Counter({row["name"]: row[key] for row in result["rows"]}) for name, key in SUMS.items()}
    return sums | {name: settings[name] for name in ("failed", "runs", "next")}


def _finished_chunks(options: Namespace, chunks: Sequence[Sequence[int]], stack: ExitStack) -> Any:
    """Return an iterator over the results of the chunks, in order."""
    if options.processes == 1:
        return map(_run_chunk, repeat(options), chunks)
    # Only this process handles Ctrl-C. Child processes finish their trials.
    ignore_sigint = (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(options.processes, get_context("spawn"), signal.signal, ignore_sigint)
    stack.callback(pool.shutdown, cancel_futures=True)
    return pool.map(_run_chunk, repeat(options), chunks)


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
