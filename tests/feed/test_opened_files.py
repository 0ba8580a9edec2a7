"""The error after the ``timeout`` of a ``DataLoader`` names the file that the worker was reading."""

import os
import time
from pathlib import Path

import pytest
from support.files.encoded import encoded
from support.process.waiting import until
from support.video.videos import video
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.stateful_dataloader import _StatefulMultiProcessingDataLoaderIter

from gpuaug import DecodeStage, StreamedLoader, collate_encoded, read_clip, read_encoded
from gpuaug.decode import collate_encoded as packing
from gpuaug.decode.clips import video_file
from gpuaug.feed.worker import OpenedFiles
from gpuaug.feed.wrapped_loader import awaited_worker

LAST_OF_WORKER = (5, 7)
"""Sample that each worker reads last: the last one of the third and of the fourth batch."""

STALLED = "stalled"
"""Beginning of the name of the file that cannot be read."""

GO_ON = "go on"
"""File that ends the wait of a worker: otherwise torch waits for seconds before it kills the worker."""


class Files(Dataset):
    def __init__(self, folder, kind, stalled=LAST_OF_WORKER[0]):
        self.kind = kind
        data = Path(video()).read_bytes() if kind == "clip" else encoded(8, 6, "BMP")
        self.paths = [folder / f"{STALLED if index == stalled else index} ä" for index in range(8)]
        self.stalled = self.paths[stalled]
        for path in self.paths:
            path.write_bytes(data)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        if self.kind == "clip":
            return read_clip(path, [0]), index
        if self.kind == "encoded":
            return read_encoded(path), index
        with path.open("rb") as file:
            stall(path)
            return file.read(), index


def stall(path):
    path = Path(os.fsdecode(path))
    while path.name.startswith(STALLED) and not path.with_name(GO_ON).exists():
        time.sleep(0.01)


def stalling(function):
    """A call that gets a path first, and waits if it is that of the stalled file."""

    def call(path, *arguments, **options):
        if isinstance(path, str | os.PathLike):
            stall(path)
        return function(path, *arguments, **options)

    return call


def read_slowly(open_file):
    def call(path):
        file = open_file(path)
        stall(path)
        return file

    return call


class _Os:
    """``os`` whose ``stat`` waits, for one module: a file server that does not answer."""

    stat = staticmethod(stalling(os.stat))

    def __getattr__(self, name):
        return getattr(os, name)


def opened_last(iterator):
    """The file that the awaited worker opened last. torchdata's iterator awaits states of workers before it is returned."""
    files = getattr(iterator, "opened_files", None)
    return files.of(awaited_worker(iterator)) if files is not None else ""


@pytest.fixture
def times_out(monkeypatch):
    """Let a ``DataLoader`` time out as soon as the worker has reached the stalled file, not after seconds."""

    def times_out_early(receive):
        def receive_or_time_out(self, timeout=5.0):
            while not (result := receive(self, 0.05))[0]:
                path = Path(opened_last(self))
                if path.name.startswith(STALLED):
                    path.with_name(GO_ON).touch()
                    return result
            return result

        return receive_or_time_out

    for cls in (_MultiProcessingDataLoaderIter, _StatefulMultiProcessingDataLoaderIter):
        monkeypatch.setattr(cls, "_try_get_data", times_out_early(cls._try_get_data))


def timed_out(dataset, cls=DataLoader, **options):
    stages = [] if dataset.kind == "opened by the dataset" else [DecodeStage(backend="cpu", threads=1)]
    wrapped = cls(dataset, 2, num_workers=2, collate_fn=collate_encoded, timeout=1000, **options)
    with StreamedLoader(wrapped, stages, device="cpu") as streamed:
        with pytest.raises(RuntimeError) as raised:
            for _ in streamed:
                pass
    return raised.value


STALLS = {
    "opened by the dataset": None,
    "encoded": (packing, "open_file", read_slowly(packing.open_file)),
    "encoded, status": (packing, "os", _Os()),
    "clip": (video_file, "os", _Os()),
    "clip, opened": (video_file, "open_file", read_slowly(video_file.open_file)),
}


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("stalls", STALLS)
def test_the_error_names_the_worker_and_the_file(stalls, worker, times_out, tmp_path, monkeypatch):
    if STALLS[stalls] is not None:
        monkeypatch.setattr(*STALLS[stalls])
    dataset = Files(tmp_path, stalls.partition(",")[0], LAST_OF_WORKER[worker])
    error = timed_out(dataset)
    assert "DataLoader timed out after 1000 seconds" in str(error)
    (note, _) = error.__notes__
    assert note.startswith(f"gpuaug: worker {worker} of the DataLoader was reading {dataset.stalled}, ")


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (DataLoader, {"persistent_workers": True}),
        (StatefulDataLoader, {}),
        pytest.param(DataLoader, {"multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
    ],
)
def test_it_does_so_in_every_kind_of_loader(cls, options, times_out, tmp_path):
    dataset = Files(tmp_path, "opened by the dataset")
    assert f"was reading {dataset.stalled}, " in timed_out(dataset, cls, **options).__notes__[0]


class Generated(DataLoader):
    """A loader whose iterator is a generator, which has no attributes."""

    def _get_iterator(self):
        return (batch for batch in super()._get_iterator())


class Hidden(DataLoader):
    """A loader whose iterator has attributes, and hides those of torch's."""

    def _get_iterator(self):
        return HiddenIterator(super()._get_iterator())


class HiddenIterator:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)


@pytest.mark.parametrize("cls", [Generated, Hidden])
def test_an_iterator_of_the_users_keeps_its_error(cls, tmp_path):
    dataset, text = Failing(tmp_path, "opened by the dataset"), ""
    try:  # pytest.raises would keep the iterator, and torch ends its workers only after seconds then
        list(StreamedLoader(cls(dataset, 2, num_workers=2, collate_fn=collate_encoded, timeout=1000), device="cpu"))
    except RuntimeError as error:
        text = str(error)
    assert "RuntimeError: b'BM" in text


class Failing(Files):
    def __getitem__(self, index):
        raise RuntimeError(self.paths[index].read_bytes()[:4])


def test_an_error_of_the_dataset_has_no_such_note(tmp_path):
    error = timed_out(Failing(tmp_path, "opened by the dataset"))
    assert not [note for note in error.__notes__ if "was reading" in note]


def test_without_timeout_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(OpenedFiles, "record", lambda *_: pytest.fail("it was"))
    dataset = Files(tmp_path, "encoded")
    wrapped = DataLoader(dataset, 2, num_workers=1, collate_fn=collate_encoded)
    assert len(list(StreamedLoader(wrapped, [DecodeStage(backend="cpu", threads=1)], device="cpu"))) == 4


def test_records_hold_any_path_and_skip_modules(tmp_path):
    """In a child, because an audit hook stays until its process ends."""
    files = OpenedFiles(3)
    paths = [tmp_path / "ä\udcff", tmp_path / ("x" * 200), b"/nowhere/bytes", tmp_path / "module.py"]
    paths[0].write_bytes(b"")
    for path in paths:
        child = os.fork()
        if child == 0:
            files.record(1)
            try:
                os.close(os.open(path, os.O_RDONLY))
            finally:
                os._exit(0)
        until(lambda child=child: os.waitpid(child, os.WNOHANG)[0] == child)
        expected = paths[2] if path == paths[3] else path
        assert files.of(1) == os.fsdecode(expected).encode(errors="replace").decode()
    assert files.of(0) == files.of(2) == ""
