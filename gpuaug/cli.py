"""The ``gpuaug`` command, with the subcommands ``bench``, ``profile`` and ``encode``."""

import argparse
import importlib
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import gpuaug

INTERRUPTED_STATUS = 130  # exit status of an interrupted command: 128 + SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: The command line without the program's name. Default: ``sys.argv``.
    """
    parser = argparse.ArgumentParser(prog="gpuaug", description="Feeds a training loop from the GPU side.")
    parser.add_argument("--version", action="version", version=f"gpuaug {gpuaug.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_bench(commands)
    _add_profile(commands)
    _add_encode(commands)
    with _interrupts_recorded() as interrupts:
        try:
            options = parser.parse_args(arguments)
            status: int = options.run(options)
        except (KeyboardInterrupt, Exception) as error:
            if not interrupts and not isinstance(error, KeyboardInterrupt):
                raise
            print("interrupted", file=sys.stderr)
            return INTERRUPTED_STATUS
    return status


@contextmanager
def _interrupts_recorded() -> Iterator[list[int]]:
    """Record every Ctrl-C in the list that is yielded.

    After a Ctrl-C, the command may end with an error other than ``KeyboardInterrupt``.

    Python drops a ``KeyboardInterrupt`` that is raised in a finaliser or while a worker is forked. The terminal also sends the
    signal to the workers, so these end, and the DataLoader raises an error about the workers some seconds later.
    """
    recorded: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        recorded.append(number)
        signal.default_int_handler(number, frame)

    # Only the main thread can set handlers. A handler that the caller has set is not replaced.
    in_main_thread = threading.current_thread() is threading.main_thread()
    replaces_handler = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if replaces_handler:
        signal.signal(signal.SIGINT, record)
    try:
        yield recorded
    finally:
        if replaces_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _add_bench(commands: Any) -> None:
    """Add the parser of ``gpuaug bench``. ``commands``: result of ``add_subparsers``."""
    parser = commands.add_parser(
        "bench",
        help="measure training loops on real photographs, with and without gpuaug",
        description="Measures three uses on real photographs: training a classifier, training a head on a frozen "
        "encoder, and augmentation alone. Downloads nothing.",
    )
    parser.add_argument("--data", type=Path, help="your own images, in a folder of class folders")
    parser.add_argument("--device", type=_device, help="device to train on (default: cuda, or cpu without a GPU)")
    parser.add_argument("--batch-size", type=_at_least(int, 1), help="images per step (default: by device)")
    parser.add_argument("--workers", type=_at_least(int, 0), help="DataLoader workers (default: by cores)")
    parser.add_argument("--seconds", type=_at_least(float, 0.001), help="length of a measurement (default: by device)")
    parser.add_argument("--repeats", type=_at_least(int, 1), default=5, help="measurements per loop (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=_at_least(float, 0.001), default=3.0, help="time limit, by fewer repeats (default: %(default)g)"
    )
    parser.add_argument("--json", type=_output_file, help="file to write the result to, with hardware, versions and commit")
    parser.set_defaults(run=lambda options: _bench(parser, options))


def _bench(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run ``gpuaug bench``, and return its exit status."""
    start = time.perf_counter()
    packages = ("kornia", "rich", "torchvision") if options.data else ("kornia", "rich", "skimage", "torchvision")
    missing_packages = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing_packages:
        names = " and ".join(missing_packages)
        print(
            f"gpuaug bench cannot run, because {names} cannot be imported. Run: pip install 'gpuaug[bench]'",
            file=sys.stderr,
        )
        return 2
    from rich.console import Console

    from gpuaug.benchkit import results
    from gpuaug.benchkit.environment import environment
    from gpuaug.benchkit.loops import reserved_cores, setup_for
    from gpuaug.benchkit.photos import class_folders, photographs
    from gpuaug.benchkit.uses import three_uses, verdict

    device = options.device or _device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console()
    console.print(f"measuring in at most {options.minutes:.3g} minutes; preparing the photographs", highlight=False)
    data = options.data or photographs()
    try:
        images = class_folders(data, None)
    except ValueError as error:
        parser.error(f"--{error}")  # ends the command. The message begins with the name of the argument: "data must be …"
    setup = setup_for(device, images, batch_size=options.batch_size, workers=options.workers)
    seconds = options.seconds or (2.0 if device.type == "cuda" else 1.0)
    with reserved_cores(setup):
        environment_at_start = environment(device)
        end = start + 60 * options.minutes
        rows = _measure(three_uses(setup), setup.batch_size, device, seconds, options.repeats, console, end)
    settings = setup.settings() | {
        "seconds": seconds,
        "repeats": options.repeats,
        "data": "photographs of scikit-image" if options.data is None else "the user's",
    }
    gpu, cpu = environment_at_start["gpu"], environment_at_start["cpu"]
    machine = gpu["name"] if gpu else f"{cpu['cores_allowed']} cores, {cpu['model']}"
    title = f"{machine}; {setup.model}, {setup.crop_px} px, batch {setup.batch_size}, workers: {setup.workers}"
    console.print(results.table(rows, title))
    console.print("ratio: steps/s divided by the steps/s of the row at 1.00, per round; median and spread over the rounds")
    if options.json is not None:
        result = results.result("uses", rows=rows, settings=settings, device=device, environment=environment_at_start)
        results.write(options.json, result)
        console.print(f"written to {options.json}")
    minutes = (time.perf_counter() - start) / 60
    excess = "" if minutes <= options.minutes else ": one round of each loop takes longer than the time limit here"
    console.print(f"took {minutes:.3g} minutes{excess}", highlight=False)
    console.print()
    for sentence in verdict(rows, device):
        console.print(f"- {sentence}", highlight=False, markup=False)
    return 0


def _measure(
    uses: Sequence[Any], batch_size: int, device: torch.device, seconds: float, repeats: int, console: Any, end: float
) -> list[dict[str, Any]]:
    """Measure the uses, and print the progress. Return the rows of a result file for all uses.

    A *use* of gpuaug, such as training a classifier, has *variants*: loops with and without gpuaug. In a *round*, each variant
    is measured once, for the length of a *window*.

    Args:
        uses: The uses (``gpuaug.benchkit.uses.Use``).
        batch_size: Images per step, for the rows.
        device: Device of the training steps.
        seconds: Length of a window in seconds.
        repeats: Maximum number of rounds.
        console: Console of the package rich, for the progress.
        end: Value of ``time.perf_counter()`` by which to finish. The uses share the time in proportion to their variants.
    """
    from gpuaug.benchkit.windows import interleave, summarise

    def print_round(count: int) -> None:
        console.print(f"  round {count} of {repeats}", highlight=False)

    rows: list[dict[str, Any]] = []
    for number, use in enumerate(uses, 1):
        console.print(f"measuring {number} of {len(uses)}: {use.case}", highlight=False, markup=False)
        now = time.perf_counter()
        share = len(use.variants) / sum(len(remaining.variants) for remaining in uses[number - 1 :])
        until = now + share * (end - now)
        windows = interleave(use.variants, device=device, seconds=seconds, repeats=repeats, until=until, on_round=print_round)
        late_s = time.perf_counter() - until
        if late_s > 0:
            console.print(f"  {late_s / 60:.2g} minutes late, because a round takes longer than planned", highlight=False)
        summary = summarise(windows, baseline=use.baseline)
        rows += [row.record(case=use.case, batch_size=batch_size) for row in summary]
    return rows


def _add_profile(commands: Any) -> None:
    """Add the parser of ``gpuaug profile``. ``commands``: result of ``add_subparsers``."""
    parser = commands.add_parser(
        "profile",
        help="measure the parts of a training step, find the bottleneck of the loop, and give advice",
        description="Runs real training steps and measures the loader, the copy, each stage and the step alone, and the loop "
        "with and without overlap. This trains the model: use a model that may be thrown away.",
    )
    parser.add_argument(
        "target",
        metavar="train.py:make",
        help="function in a file, or in package.module, that returns a StreamedLoader and a step",
    )
    parser.add_argument("--batches", type=_at_least(int, 8), default=40, help="batches per measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=_at_least(int, 1), default=3, help="measurements per loop (default: %(default)s)")
    parser.add_argument(
        "--timeline", type=_output_file, help="file for a picture of ten batches (.png, .svg) or a trace (.json)"
    )
    parser.add_argument("--json", type=_output_file, help="file to write the result to, with hardware, versions and commit")
    parser.set_defaults(run=lambda options: _profile(parser, options))


def _profile(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run ``gpuaug profile``, and return its exit status."""
    if options.timeline is not None:  # checked before anything is measured
        suffix = options.timeline.suffix.lower()
        suffixes = gpuaug.Timeline.SUFFIXES
        if suffix not in suffixes:
            ends = ", ".join(suffixes)
            parser.error(
                f"--timeline must end with one of {ends}, got {str(options.timeline)!r}. The suffix selects the format."
            )
        if suffix != ".json" and not importlib.util.find_spec("matplotlib"):
            parser.error(
                "No timeline can be drawn, because matplotlib is not installed. Run pip install matplotlib, or pass a "
                "file that ends with .json."
            )
    result = _call_target(parser, options.target)
    if not (isinstance(result, tuple) and len(result) == 2):
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        parser.error(f"{options.target} must return a loader and a step, got {got}. Write: return loader, step.")
    loader, step = result
    from gpuaug.benchkit import environment, results

    writes_result = options.json is not None and isinstance(loader, gpuaug.StreamedLoader)  # ``profile`` refuses other loaders
    environment_at_start = environment.environment(loader.device) if writes_result else None
    try:
        with _log_on_stderr():
            report = gpuaug.profile(loader, step, batches=options.batches, rounds=options.rounds)
    except (gpuaug.ArgumentError, gpuaug.ArgumentTypeError) as error:
        parser.error(str(error))
    if options.json is not None:
        settings = report.settings | {"verdict": list(report.verdict)}
        profiled = results.result(
            "profile", rows=report.rows(), settings=settings, device=loader.device, environment=environment_at_start
        )
        results.write(options.json, profiled)
    if options.timeline is not None:
        report.timeline.save(options.timeline)
    return 0


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Write gpuaug's log messages, which report the progress of the profile, to stderr, even if that is not a terminal."""
    log = logging.getLogger("gpuaug")
    handler = logging.StreamHandler()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _add_encode(commands: Any) -> None:
    """Add the parser of ``gpuaug encode``. ``commands``: result of ``add_subparsers``."""
    parser = commands.add_parser(
        "encode",
        help="fill a feature cache before training",
        description="Encodes the images of the epochs that a cache records, unless it has their features. Trains nothing.",
    )
    parser.add_argument(
        "target", metavar="train.py:make", help="function in a file, or in package.module, that returns a StreamedLoader"
    )
    parser.set_defaults(run=lambda options: _encode(parser, options))


def _encode(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run ``gpuaug encode``: iterate over the epochs of the cache, which fills it. Return the exit status."""
    result = _call_target(parser, options.target)  # a loader, or as for ``gpuaug profile`` (loader, step)
    loader = result[0] if isinstance(result, tuple) and result else result
    stages = loader.stages if isinstance(loader, gpuaug.StreamedLoader) else ()
    cache = next((stage.cache for stage in stages if stage.cache is not None), None)
    if cache is None:
        got = "a StreamedLoader without one" if isinstance(loader, gpuaug.StreamedLoader) else type(loader).__name__
        parser.error(
            f"{options.target} must return a StreamedLoader with a feature cache, got {got}. Give one of its stages a cache."
        )
    for epoch in range(cache.views):
        loader.set_epoch(epoch)
        for batch, _ in enumerate(loader, 1):
            print(f"\rview {epoch + 1} of {cache.views}, batch {batch}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    print(cache)
    return 0


def _call_target(parser: argparse.ArgumentParser, target: str) -> Any:
    """Call the function that ``train.py:make`` or ``package.module:make`` names, and return its result."""
    module, _, name = target.rpartition(":")
    file = Path(module)
    if not name or not (file.suffix == ".py" or all(part.isidentifier() for part in module.split("."))):
        rule = "train.py:make or package.module:make"
        parser.error(f"target must be {rule}, got {target!r}. Name a function that returns a loader and a step.")
    module_object = _import_file(parser, file) if file.suffix == ".py" else _import_module(parser, module)
    function = getattr(module_object, name, None)
    if not callable(function):
        names = (key for key, value in vars(module_object).items() if callable(value) and not key.startswith("_"))
        listed = ", ".join(sorted(names))
        parser.error(f"target must name a function of {module}, got {name!r}. {module} has: {listed or 'none'}.")
    return function()


def _import_file(parser: argparse.ArgumentParser, file: Path) -> Any:
    """Import a file as a module, with its folder on ``sys.path`` as for ``python train.py``."""
    if not file.is_file():
        parser.error(f"target must name an existing file, got {str(file)!r}. Pass its path from the working directory.")
    sys.path.insert(0, str(file.parent.resolve()))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import_module(parser: argparse.ArgumentParser, module: str) -> Any:
    """Import ``module``, with the working directory on ``sys.path`` as for ``python -m``."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports does not
        parser.error(
            f"target must be in a module that can be imported, got {module!r}. Run the command in the module's folder."
        )


def _output_file(text: str) -> Path:
    """Return the path of a file to write. That it can be written is checked here, before anything is measured."""
    path = Path(text)
    folder = next((parent for parent in path.absolute().parents if parent.exists()), path)  # missing folders are created
    if path.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise argparse.ArgumentTypeError(
            f"value must be a file that can be written, got {text!r}. Pass a path such as out.json."
        )
    return path


def _device(text: str) -> torch.device:
    """Return the device that ``text`` names, after a test that torch can create a tensor on it."""
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch that was built without CUDA
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(
            f"device must be a device that torch can use here, got {text!r} ({reason}). Pass cpu to run without a GPU."
        ) from None
    return device


def _at_least(convert: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    """Return a function that converts an argument of the command line to a number of at least ``least``."""

    def number(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not value >= least:
            rule = f"{'whole number' if convert is int else 'number'} of at least {least}"
            raise argparse.ArgumentTypeError(f"value must be a {rule}, got {text!r}. Leave it out for the default.")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
