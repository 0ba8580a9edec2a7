"""The decoder's threads: they end with the iterator, after the call that they are in, and so does the process."""

import gc
import signal
import threading
from ast import literal_eval
from concurrent.futures import wait
from contextlib import closing, suppress
from functools import cached_property

import pytest
import torch
from support import internals
from support.files import nvjpeg_double
from support.files.encoded import encoded
from support.process import processes
from support.process.waiting import WAIT_S, until
from support.video import nvdec_double
from support.video.videos import video

from gpuaug import DecodeStage, StreamedLoader, collate_encoded, read_clip
from gpuaug.core.errors import IteratorEndedError
from gpuaug.decode import decoding, nvjpeg
from gpuaug.decode.clips.layout import ClipLayout
from gpuaug.decode.decoders import cpu, loops, nvdec
from gpuaug.decode.decoders.base import share
from gpuaug.decode.layout import Layout
from gpuaug.loader.hooks import Hooks
from gpuaug.loader.inspection import Inspection

FILES = [encoded(16, 8, seed=number) for number in range(24)]


def loader(**options):
    """Batches of two, which are all there at once."""
    samples = [(file, number) for number, file in enumerate(FILES)]
    data = [collate_encoded(samples[start : start + 2]) for start in range(0, len(samples), 2)]
    return StreamedLoader(data, [DecodeStage()], device="cpu", **options)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpuaug-decode")]


class Held:
    """Holds threads in the decoding of images from some sample on, until what is submitted is abandoned."""

    def __init__(self, patch, first):
        self.leaving, self.inside, self._lock = threading.Event(), 0, threading.Lock()
        self._first, self._decode, self._abandon = first, cpu.decode, decoding.Decoding.abandon
        self.when_held = lambda: None
        patch.setattr(cpu, "decode", self.decode)
        patch.setattr(decoding.Decoding, "abandon", lambda batch: self.leaving.set() or self._abandon(batch))

    def decode(self, file, *arguments):
        held = FILES.index(file.tobytes()) >= self._first
        with self._lock:
            self.inside += held
        if held:
            self.when_held()
            assert self.leaving.wait(WAIT_S)
        made = self._decode(file, *arguments)
        with self._lock:
            self.inside -= held
        return made


@pytest.mark.parametrize("through", ["call", "loader"])
def test_threads_stop_after_their_current_image_at_an_interrupt(through, monkeypatch):
    decoded, abandoned, decode, abandon = [], [], cpu.decode, decoding.Decoding.abandon

    def interrupt(file, *arguments):
        decoded.append(file)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        until(lambda: abandoned and all(work.is_abandoned for work in abandoned[0].works))
        return decode(file, *arguments)

    monkeypatch.setattr(cpu, "decode", interrupt)
    monkeypatch.setattr(decoding.Decoding, "abandon", lambda batch: abandoned.append(batch) or abandon(batch))
    stage, batch = DecodeStage(threads=1), collate_encoded(FILES)
    streamed = StreamedLoader([batch], [stage], device="cpu")
    with pytest.raises(KeyboardInterrupt), streamed:
        stage(batch, "cpu") if through == "call" else next(iter(streamed))
    assert len(decoded) == 1


@pytest.mark.parametrize("decoder", ["engines", "nvdec"])
def test_threads_that_feed_a_card_make_no_call_after_an_interrupt(decoder, monkeypatch):
    calls, abandoned, abandon = [], [], decoding.Decoding.abandon

    def interrupt():
        calls.append(1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        until(lambda: abandoned and all(work.is_abandoned for work in abandoned[0].works))

    class Interrupting(nvjpeg_double.BatchDecoder):
        def decode(self, calls, stream):
            interrupt()
            return [nvjpeg_double.BAD_JPEG] * len(calls)  # each file is then decoded in a call of its own

    monkeypatch.setattr(decoding.Decoding, "abandon", lambda batch: abandoned.append(batch) or abandon(batch))
    monkeypatch.setattr(nvdec, "MAX_SESSIONS", 1)
    if decoder == "engines":
        nvjpeg_double.use(monkeypatch, Interrupting)
        samples = FILES[:4]
    else:
        nvdec_double.use(monkeypatch, change=lambda frames, ended: (interrupt() if ended else None) or frames)
        samples = [read_clip(video(), 2, start=start) for start in (0, 9, 18)]
    stage = DecodeStage(**({"backend": "engines"} if decoder == "engines" else {}))
    with pytest.raises(KeyboardInterrupt):
        stage(collate_encoded([(sample, 0) for sample in samples])[0], "cpu")
    assert len(calls) == 1


def leave_by_closing_the_iterator(streamed, iterators):
    iterators.pop().close()


def leave_by_closing_the_loader(streamed, iterators):
    streamed.close()


def leave_by_closing_the_loader_elsewhere(streamed, iterators):
    closing = threading.Thread(target=streamed.close)
    closing.start()
    closing.join()


def leave_by_del(streamed, iterators):
    iterators.clear()


def leave_by_an_error(streamed, iterators):
    with suppress(LookupError):
        iterators.pop().throw(LookupError)


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_closing_the_iterator,
        leave_by_closing_the_loader,
        leave_by_closing_the_loader_elsewhere,
        leave_by_del,
        leave_by_an_error,
    ],
)
def test_leaving_waits_for_what_is_decoded(monkeypatch, leave):
    held = Held(monkeypatch, first=6)
    streamed = loader()
    iterators = [iter(streamed)]
    next(iterators[0])
    (pipelined,) = internals.iterators(streamed)
    wait(
        [work._future for submitted in internals.submitted(pipelined) for _, work in submitted.work]
    )  # or it might want threads
    next(iterators[0])
    until(lambda: held.inside)
    gc.disable()
    try:
        leave(streamed, iterators)
        assert not held.inside
        assert not threads()
    finally:
        gc.enable()
    monkeypatch.undo()
    assert [numbers.tolist() for _, numbers in streamed] == [[number, number + 1] for number in range(0, 24, 2)]


def test_closing_the_loader_while_a_batch_is_waited_for(monkeypatch):
    held = Held(monkeypatch, first=4)
    streamed = loader(depth=0)

    def close():
        until(lambda: held.inside)
        threading.Timer(0.05, held.leaving.set).start()  # long enough for closing to get where it must wait
        streamed.close()

    closing = threading.Thread(target=close)
    closing.start()
    arrived = []
    with pytest.raises(IteratorEndedError):
        arrived.extend(numbers.tolist() for _, numbers in streamed)
    assert arrived == [[0, 1], [2, 3], [4, 5]]
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert not threads()


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_is_heard_while_a_batch_is_waited_for(monkeypatch):
    held = Held(monkeypatch, first=4)
    heard = []

    def interrupt(*_):
        if not heard:
            heard.append(True)
            raise KeyboardInterrupt

    def press():
        while not held.leaving.wait(0.01):  # again where it came before the loop was waiting
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    held.when_held = press
    signal.signal(signal.SIGINT, interrupt)
    streamed, arrived = loader(depth=0), []
    with pytest.raises(KeyboardInterrupt):
        arrived.extend(numbers.tolist() for _, numbers in streamed)
    assert arrived == [[0, 1], [2, 3]]
    assert not threads()
    assert len(list(streamed)) == 12


def test_two_iterators_have_threads_of_their_own():
    streamed = loader()
    first, second = iter(streamed), iter(streamed)
    for (images, numbers), (others, same) in zip(first, second, strict=True):
        assert numbers.tolist() == same.tolist()
        assert all(torch.equal(*pair) for pair in zip(images, others, strict=True))
        if numbers[0] == 4:
            second.close()
            break
    assert [numbers.tolist()[0] for _, numbers in first] == list(range(6, 24, 2))
    assert not threads()


def test_threads_are_started_with_the_first_batch():
    iterator = iter(loader())
    assert not threads()
    next(iterator)
    assert {thread.name.rpartition("_")[0] for thread in threads()} == {"gpuaug-decode", "gpuaug-decode-cpu"}


def test_the_slowest_files_are_decoded_first(monkeypatch):
    files = [encoded(16, 8), encoded(32, 16, "PNG"), encoded(16, 8, progressive=True), encoded(64, 32), encoded(8, 8, "PNG")]
    monkeypatch.setattr(loops, "png_and_webp_loop", lambda: None)
    order, decode = [], cpu.decode
    monkeypatch.setattr(cpu, "decode", lambda *arguments: order.append(arguments[2].start) or decode(*arguments))
    encoded_files = collate_encoded(files)
    ((images, _),) = StreamedLoader([[encoded_files, 0]], [DecodeStage(threads=1)], device="cpu")
    assert order == encoded_files.headers.table["start"][[1, 3, 4, 2, 0]].tolist()
    assert [tuple(image.shape[1:]) for image in images] == [(8, 16), (16, 32), (8, 16), (32, 64), (8, 8)]


@pytest.mark.parametrize("decoder", ["cpu", "pyav", "nvdec"])
def test_infos_are_computed_once_per_batch_before_it_is_given_to_threads(monkeypatch, decoder):
    sessions = nvdec_double.use(monkeypatch).sessions if decoder == "nvdec" else []
    layout = Layout if decoder == "cpu" else ClipLayout
    computed, compute = [], layout.infos.func

    def noted(of_batch):
        computed.append(threading.current_thread().name.rpartition("_")[0])
        return compute(of_batch)

    infos = cached_property(noted)
    infos.__set_name__(layout, "infos")
    monkeypatch.setattr(layout, "infos", infos)
    samples = FILES[:8] if decoder == "cpu" else [read_clip(video(), 2, start=start) for start in range(8)]
    batches = [[collate_encoded(samples[first : first + 4]), first] for first in (0, 4)]
    assert len(list(StreamedLoader(batches, [DecodeStage(threads=4)], device="cpu"))) == 2
    assert computed == ["gpuaug-decode"] * 2, "a thread that decodes has computed them"
    assert (len(sessions) > 0) == (decoder == "nvdec")


def test_an_error_of_the_library_comes_at_its_batch_and_leaves_nothing(monkeypatch):
    class Failing(nvjpeg_double.BatchDecoder):
        def decode_call(self, files, stream):
            # By the file and not by the count of calls: two threads prepare batches, and either may be first.
            if FILES.index(nvjpeg_double.content(files[0])) >= 4:
                raise nvjpeg.NvJpegError("nvjpegDecodeBatched", 6)
            return super().decode_call(files, stream)

    nvjpeg_double.use(monkeypatch, Failing)
    arrived = []
    with pytest.raises(nvjpeg.NvJpegError) as raised:
        arrived.extend(numbers.tolist() for _, numbers in loader())
    assert arrived == [[0, 1], [2, 3]]
    assert raised.value.__notes__ == ["gpuaug: raised in stage 'decode', at batch 2 of epoch 0."]
    assert not threads()


EXITS = """
import os, sys, time
from support.files.encoded import encoded
from torch.utils.data import DataLoader
import gpuaug
from gpuaug.decode.decoders import cpu

sys.modules["numba"] = None  # whose compilation takes seconds in each process
leave, started = None, {}
for name in ("idle", "in flight", "by an error", "workers"):
    pid = os.fork()
    if pid == 0:
        leave = name
        break
    started[name] = pid
if leave is None:
    print({name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in started.items()})
    sys.exit()

workers = dict(num_workers=1) if leave == "workers" else {}
data = DataLoader([encoded(16, 8)] * 40, batch_size=2, collate_fn=gpuaug.collate_encoded, **workers)
loader = gpuaug.StreamedLoader(data, [gpuaug.DecodeStage()], device="cpu", feed="ring" if workers else "auto")
batches = iter(loader)
if leave in ("in flight", "workers"):
    decode, calls = cpu.decode, []

    def slow(*arguments):
        calls.append(1)
        if len(calls) > 4:
            time.sleep(0.1)  # so that the interpreter is ending meanwhile
        return decode(*arguments)

    cpu.decode = slow
next(batches), next(batches)
if leave == "by an error":
    raise SystemExit(3)
"""


def test_a_process_ends_while_images_are_decoded():
    done = processes.run_script(EXITS)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert literal_eval(done.stdout) == {"idle": 0, "in flight": 0, "by an error": 3, "workers": 0}


class DecodesWhileWaited(Hooks):
    """Holds threads in the decoding of images until the training thread waits for them. The sixth file is damaged."""

    def __init__(self, patch):
        self.held, self._waits, self._decode = True, threading.Event(), cpu.decode
        patch.setattr(cpu, "decode", self.decode)

    def decode(self, file, *arguments):
        assert not self.held or self._waits.wait(WAIT_S), "it was not waited for"
        return "it is damaged" if file.tobytes() == FILES[5] else self._decode(file, *arguments)

    def span(self, name, batch, lane=None, *, waits=False):
        if name == "gpuaug/wait for decoding":
            self._waits.set()
        return super().span(name, batch, lane, waits=waits)

    def hold(self):
        self._waits.clear()
        self.held = True


def test_waits_for_decoding_are_counted_where_the_training_thread_blocks(monkeypatch):
    data = [collate_encoded(FILES[first : first + 2]) for first in (0, 2, 4)]
    loader = StreamedLoader(data, [DecodeStage(on_error="replace")], device="cpu")
    inspection, hooks = Inspection(loader), DecodesWhileWaited(monkeypatch)
    consumer = inspection.lanes.consumer()
    counted = []

    def take():
        batches.fill(consumer)
        batches.pop(consumer)
        counted.append(loader.stats().decode_waits)

    with inspection.with_hooks(hooks), closing(inspection.begin(2)) as batches:
        take()
        hooks.held = False
        until(
            lambda: (
                len(internals.submitted(batches)) == 2 and all(submitted.done() for submitted in internals.submitted(batches))
            )
        )
        take()
        hooks.hold()  # the last batch has been decoded, and is decoded again without its damaged image
        take()
    assert counted == [1, 1, 2]
    assert loader.stats().decode_wait_ms > 0
    assert (loader.stats().starved, loader.stats().replaced) == (0, 1)


def test_a_call_that_could_not_be_submitted_finds_no_image_later():
    """An executor keeps a call whose thread did not start. It runs when the memory of its batch is used for other images."""
    pending, kept = iter(range(3)), []

    def submit(*call):
        kept.append(call)
        raise RuntimeError("can't start new thread")

    finish = share(submit, 2, list, pending)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        finish()
    assert [function(items) for function, items in kept] == [[]]
