"""The decoder's threads on the double of the stream layer: memory of pixels and slots is ordered between them and the lanes.

The engines are a stream that waits for nothing but what the host has seen, as they do. What nvJPEG queues behind them is on
the decoder's lane, and reads memory of nvJPEG's that the next call writes.
"""

import gc
import itertools
import threading
import time
import weakref
from collections import deque
from concurrent.futures import wait

import pytest
import torch
from protocol.scenarios import install, kernel, name_lanes, read_with
from support.files import nvjpeg_double
from support.files.encoded import encoded
from support.gpu.stream_double import Buffer, FakeEvent, FakeStream, HostBuffer
from support.gpu.stream_history import FREED, REUSED, UNREADY
from support.process.waiting import WAIT_S, until

from gpuaug import DecodeStage, GpuAugWarning, StreamedLoader, collate_encoded
from gpuaug.core import batch
from gpuaug.core.ragged import Ragged
from gpuaug.core.streams import Lane, Lanes
from gpuaug.decode import decoder, decoding, layout, nvjpeg
from gpuaug.decode.decoders.base import PREPARED
from gpuaug.feed import ring
from gpuaug.feed.prefetch import FeedIterator
from gpuaug.feed.ring import Ring
from gpuaug.loader.iterator import PipelinedIterator

FOR_ENGINES = [encoded(16, 8), encoded(24, 8)]
TURNED = [encoded(16, 8), encoded(24, 8, orientation=6)]
MIXED = [encoded(16, 8), encoded(24, 8, "PNG")]
FOR_HYBRID = [encoded(16, 8, progressive=True), encoded(24, 8, progressive=True, orientation=6)]
ALL_DECODERS = [*MIXED, *FOR_HYBRID]
BATCHES = 7
SCRATCH = "nvJPEG's memory"


@pytest.fixture(autouse=True)
def _compiled_loops_are_frozen():
    """Keep the garbage collector from walking over loops that the first batch compiles: half of the time of this file."""
    yield
    gc.freeze()


class Pixels(torch.Tensor):
    """Memory for pixels: of the host, and a buffer of the double that stands for it."""

    @classmethod
    def allocated(cls, cuda, name, length):
        tensor = torch.empty(length, dtype=torch.uint8).as_subclass(cls)
        tensor.buffer = Buffer(cuda, name, 0, length)
        return tensor


class Slots(Ring):
    """A ring whose slots are buffers of the double."""

    pinned_bytes = 1000

    def __init__(self):
        self._copies = deque()

    def page_lock(self):
        pass

    def close(self):
        pass


class Machine:
    """A double of a GPU with JPEG engines, and a loader of encoded batches on it."""

    def __init__(self, patch, files=FOR_ENGINES, keeps_up=False, **options):
        self.cuda = cuda = install(patch, keeps_up=keeps_up)
        self.engines = FakeStream(cuda, "engines")
        cuda.history.alloc(SCRATCH, "block of nvJPEG")
        self.going = threading.Event()
        """Set while the engines work."""
        self.going.set()
        self._owners = []
        self._slot_keys = {}
        self.most_staged = 0
        """The most pieces of page-locked memory that pixels lay in at once."""
        self.staged_at_rest = options.get("depth", 2) + 3
        self._staged = weakref.WeakSet()
        self._pixels = weakref.WeakSet()
        each = files if callable(files) else lambda number: files
        self._batches = [(collate_encoded(each(number)), HostBuffer(cuda, "labels", [])) for number in range(BATCHES)]
        self._double(patch)
        self.loader = StreamedLoader(self._batches, [DecodeStage(), self._augment], device="cuda", **options)
        self._ring = Slots()
        self.loader._shared.feed._rings.append(weakref.ref(self._ring))
        name_lanes(cuda, self.loader)

    def count_staged(self):
        """Count page-locked memory, after threads whose batch is done have had the time to drop theirs."""
        ends = time.monotonic() + 2
        while len(self._staged) > self.staged_at_rest and time.monotonic() < ends:
            time.sleep(0.001)
        self.most_staged = max(self.most_staged, len(self._staged))

    def _augment(self, images):
        return kernel(self.cuda, images)

    def _double(self, patch):
        cuda, machine, empty = self.cuda, self, torch.empty

        class Engines(nvjpeg_double.BatchDecoder):
            def decode_call(self, files, number):
                assert machine.going.wait(WAIT_S)
                machine._decode(files, number)
                return 0

        def allocated(length, device, dtype=torch.uint8, *, pin_memory=False):
            if pin_memory:
                staging = empty(length, dtype=torch.uint8)
                machine._staged.add(staging)
                machine.count_staged()
                return staging
            pixels = Pixels.allocated(cuda, "pixels", length)
            machine._pixels.add(pixels)
            machine._owners.append((pixels.data_ptr(), length, pixels.buffer.key))
            return pixels

        def copied(work, device, non_blocking=False):
            """``Work.to``, on the copy lane."""
            if work.raw is not None:
                cuda.read(work.raw.buffer)
                cuda.write(work.data.buffer)
            return work.data.buffer

        def copy_parts(lane, target, source, parts):
            with cuda.operation() as history:
                history.write(lane.stream, target.buffer.key, part="images decoded on the CPU")

        class Slotted(FeedIterator):
            def _get(self, block):
                pulled = super()._get(block)
                if not pulled.ended:
                    with cuda.stream(FakeStream(cuda, "worker")):
                        slot = cuda.new("slot", 0)
                        written = cuda.Event()
                        written.record()
                    with cuda.operation() as history:
                        history.learn(written)  # it has been sent, so it has been written
                    pulled.slot = ring.Slots(machine._ring, slot)
                    start, length = pulled.batch[0].data.data_ptr(), pulled.batch[0].data.nbytes
                    machine._slot_keys[start, start + length] = slot.key
                return pulled

        abandon = decoding.Decoding.abandon

        def abandoned(decoding):
            machine.going.set()
            abandon(decoding)

        patch.setattr(decoding.Decoding, "abandon", abandoned)

        class Phased(nvjpeg_double.PhasedDecoder):
            def card_phases(self, states, files, number):
                lane = next(stream for stream in itertools.chain(*cuda._streams.values()) if stream.cuda_stream == number)
                for address in files["output"]["channel"][:, 0].tolist():
                    with cuda.operation() as history:
                        history.write(lane, machine._owner(address), part=address)
                return [""] * len(files)

        nvjpeg_double.use(patch, Engines, Phased)
        patch.setattr(decoder, "allocate_pixels", allocated)
        patch.setattr(nvjpeg, "enter", lambda device: None)
        patch.setattr(layout.Work, "to", copied)
        patch.setattr(Lane, "copy_parts", copy_parts)
        patch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
        read_with(patch, Slotted)

    def _decode(self, files, number):
        cuda, history = self.cuda, self.cuda.history
        lane = next(stream for stream in itertools.chain(*cuda._streams.values()) if stream.cuda_stream == number)
        images = [(self._owner(address), address) for address in files["output"]["channel"][:, 0].tolist()]
        with cuda.operation():
            for (start, end), slot in self._slot_keys.items():
                if start <= files["address"][0] < end:
                    history.read(self.engines, slot)
            history.write(self.engines, SCRATCH)
            for pixels, part in images:
                history.write(self.engines, pixels, part)
            history.record("end of the call", self.engines)
            history.learn("end of the call")
            history.read(lane, SCRATCH)
            for pixels, part in images:
                history.write(lane, pixels, part)
            history.record("colours converted", lane)
            history.learn("colours converted")

    def _owner(self, address):
        # The latest: malloc gives an address again.
        return next(key for start, length, key in reversed(self._owners) if start <= address < start + length)

    def _futures(self):
        """The decoding of all that is submitted."""
        iterators = self.loader._iterators
        return [work._future for each in iterators for submitted in each._submitted for _, work in submitted.work]

    def train(self, *, kept=False, leave=None, in_flight=False):
        """Read some epochs. ``leave`` them after this batch, when what is submitted has been decoded, or while it is."""
        held = []
        for _ in range(3):
            batches = iter(self.loader)
            for number, received in enumerate(batches):
                self.cuda.read(*batch.leaves(received))
                if kept and number % 3 == 0:
                    held.append(received)
                if number == leave:
                    break
                if in_flight and number + 1 == leave:
                    wait(self._futures())  # what comes next is launched, and the batch after it is not decoded
                    self.going.clear()
            if in_flight:
                until(lambda: all(future.running() or future.done() for future in self._futures()))  # none is cancelled
            else:
                wait(self._futures())
            batches.close()
            del received
            gc.collect()
            for each in held:
                self.cuda.read(*batch.leaves(each))
            held.clear()
        self.loader.close()
        self._use_what_came_back()
        return self.cuda.history

    def _use_what_came_back(self):
        """Write to all memory that a batch launched now might be given."""
        lanes = self.loader._shared.lanes
        stream = lanes.copy.stream
        lanes.copy.wait(lanes.consumer().record_event())  # as before each batch
        with self.cuda.stream(stream):
            held = []
            while pool := self.cuda._pools[stream]:
                held.append(Buffer(self.cuda, "later", 0, self.cuda.block_bytes[pool[-1]]))
                self.cuda.write(held[-1])


LEFT_IN_FLIGHT = {"leave": 2, "in_flight": True}
FILES = {"engines": FOR_ENGINES, "turned": TURNED, "mixed": MIXED, "hybrid": FOR_HYBRID, "all": ALL_DECODERS}
DEPTHS = (0, 1, 2, 3)
HOW = {"read": {}, "kept": {"kept": True}, "left early": {"leave": 2}, "left in flight": LEFT_IN_FLIGHT}


def loops():
    """Every loop. Those that are not slow have each pair of files, depth and how it is read or left."""
    for (row, (files, chosen)), depth, (number, (name, how)) in itertools.product(
        enumerate(FILES.items()), DEPTHS, enumerate(HOW.items())
    ):
        marks = () if number == (row + depth) % len(HOW) else pytest.mark.slow
        yield pytest.param(chosen, depth, how, id=f"{name}-{depth}-{files}", marks=marks)


@pytest.mark.parametrize(("files", "depth", "how"), loops())
def test_nothing_is_unordered(monkeypatch, files, depth, how):
    if not depth:
        how = {**how, "in_flight": False}  # nothing is between two batches
    history = Machine(monkeypatch, files, depth=depth).train(**how)
    assert not history.violations, history.report()


def pixel_blocks(history):
    return {line.rpartition(" in block ")[2] for line in history.log if line.startswith("alloc pixels")}


def no_wait_on_the_host(patch, machine):
    synchronize = FakeEvent.synchronize

    def synchronize_elsewhere(event):
        if not threading.current_thread().name.startswith("gpuaug-decode"):
            synchronize(event)

    patch.setattr(FakeEvent, "synchronize", synchronize_elsewhere)


def wait_for_an_earlier_event(patch, machine):
    start = decoder.Decoder.start

    def start_with(self, pools, works):
        first.append(self._lanes.copy.record_event())
        self._lanes.copy.record_event = lambda **_: first[0]
        try:
            return start(self, pools, works)
        finally:
            del self._lanes.copy.record_event

    first = []
    patch.setattr(decoder.Decoder, "start", start_with)


def no_wait_for_the_decoder(patch, machine):
    def collect(self, host_batch, waiting):
        self._future.result()
        return host_batch

    patch.setattr(decoding.Decoding, "collect", collect)


def engines_begin_when_a_batch_is_wanted(patch, machine):
    """In each epoch anew, so that all that may be submitted has been."""
    collect, close = decoding.Decoding.collect, PipelinedIterator.close

    def collect_now(self, host_batch, waiting):
        machine.going.set()
        return collect(self, host_batch, waiting)

    def close_and_stop(self):
        close(self)
        machine.going.clear()

    machine.going.clear()
    patch.setattr(decoding.Decoding, "collect", collect_now)
    patch.setattr(PipelinedIterator, "close", close_and_stop)


def no_order_after_what_is_abandoned(patch, machine):
    patch.setattr(decoder.Decoder, "settle", lambda self: None)


def slots_released_when_submitted(patch, machine):
    submit = PipelinedIterator._submit

    def submit_only(self, pulled):
        submit(self, pulled)
        pulled.slot = None

    engines_begin_when_a_batch_is_wanted(patch, machine)
    patch.setattr(PipelinedIterator, "_submit", submit_only)


@pytest.mark.parametrize(
    ("mutate", "files", "how", "rule", "words"),
    [
        (no_wait_on_the_host, FOR_ENGINES, {}, REUSED, "engines writes pixels"),
        (no_wait_on_the_host, FOR_ENGINES, {"kept": True}, REUSED, "engines writes pixels"),
        (wait_for_an_earlier_event, FOR_ENGINES, {}, REUSED, "engines writes pixels"),
        (no_wait_for_the_decoder, MIXED, {}, UNREADY, "reads pixels"),
        (no_wait_on_the_host, FOR_HYBRID, {"kept": True}, REUSED, "writes pixels"),
        (no_order_after_what_is_abandoned, MIXED, LEFT_IN_FLIGHT, REUSED, "last use: decode/decode lane writes pixels"),
        (slots_released_when_submitted, FOR_ENGINES, {}, FREED, "engines reads slot"),
    ],
)
def test_a_broken_order_is_caught(monkeypatch, mutate, files, how, rule, words):
    machine = Machine(monkeypatch, files, depth=2)
    mutate(monkeypatch, machine)
    history = machine.train(**how)
    assert any(violation.rule == rule and words in violation.text for violation in history.violations), history.report()


def test_slots_are_free_again_after_decoding(monkeypatch):
    history = Machine(monkeypatch, keeps_up=True, depth=2).train()
    assert not history.violations, history.report()
    allocated = [line for line in history.log if line.startswith("alloc slot")]
    freed = [line for line in history.log if line.startswith("free slot")]
    assert len(allocated) == 3 * BATCHES
    assert len(freed) > 2 * BATCHES


def test_device_memory_is_bounded_over_epochs(monkeypatch):
    assert len(pixel_blocks(Machine(monkeypatch, depth=2).train())) <= 2 * 2 + 3 + PREPARED


@pytest.mark.parametrize(("depth", "step"), [(0, 24), (1, 0), (2, 24), (3, 0), (3, 24)])
def test_memory_of_pixels_is_within_its_formula(monkeypatch, depth, step):
    def files(number):
        return [encoded(64, 64 + step * number), encoded(64, 64 + step * number, "PNG")]

    machine = Machine(monkeypatch, files, depth=depth)
    machine.cuda.bytes_of = lambda number: 0  # what is not pixels
    machine.train()
    largest = 2 * 3 * 64 * (64 + step * (BATCHES - 1))
    assert largest < machine.cuda.most_live_bytes <= (depth + 7) * (1.125 * largest + 4096)
    assert 0 < machine.most_staged <= machine.staged_at_rest


def decode_without_a_loader(patch, files):
    """Call the stage by itself on two streams in turn, after a loader on another, whose lanes' streams it takes."""
    machine = Machine(patch, files)
    cuda, decode, third = machine.cuda, DecodeStage(), FakeStream(machine.cuda, "third")
    with cuda.stream(FakeStream(cuda, "second")):
        for received in machine.loader:
            cuda.read(*batch.leaves(received))
    machine.loader = received = None
    gc.collect()
    to = decoder.Work.to

    def moved(work, device, non_blocking=False):
        return Ragged(to(work, device), cuda.new("places", 0), None)

    patch.setattr(decoder.Work, "to", moved)
    streams = sum(map(len, cuda._streams.values()))
    for consumer in [third, cuda.default] * 2:
        with cuda.stream(consumer):
            images = decode(collate_encoded(files), "cuda")
            cuda.read(images.data, images.places)
            del images
            gc.collect()
    assert sum(map(len, cuda._streams.values())) == streams, "the loader's streams were not taken"
    return cuda.history


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_a_stage_that_is_called_by_itself_is_ordered_after_the_readers_of_a_loader_that_is_gone(monkeypatch, files):
    history = decode_without_a_loader(monkeypatch, files)
    assert not history.violations, history.report()


@pytest.mark.parametrize(
    ("method", "rule", "words"),
    [
        ((Lanes, "wait_for_consumers"), REUSED, "last use: second reads labels"),
        ((Lane, "wait"), UNREADY, "third reads pixels"),
        ((Lane, "reads"), REUSED, "last use: third reads pixels"),
    ],
)
def test_a_broken_order_of_a_stage_that_is_called_by_itself_is_caught(monkeypatch, method, rule, words):
    owner, name = method
    real = getattr(owner, name)

    def broken(lane, *args):
        if method == (Lane, "wait") and lane.name != "consumer":
            real(lane, *args)

    monkeypatch.setattr(owner, name, broken)
    history = decode_without_a_loader(monkeypatch, MIXED)
    assert any(violation.rule == rule and words in violation.text for violation in history.violations), history.report()


def test_stats_count_slots_and_images_that_are_being_decoded(monkeypatch):
    machine = Machine(monkeypatch, MIXED)

    def staged():
        return sum(staging.nbytes for staging in machine._staged)

    assert machine.loader.stats().pinned_bytes == Slots.pinned_bytes
    batches = iter(machine.loader)
    next(batches)
    assert staged() > 0
    until(lambda: machine.loader.stats().pinned_bytes == Slots.pinned_bytes + staged())
    assert machine.loader.stats().decode_bytes == sum(pixels.nbytes for pixels in machine._pixels)
    list(batches)
    del batches
    until(lambda: machine.loader.stats().pinned_bytes == Slots.pinned_bytes)
    until(lambda: machine.loader.stats().decode_bytes == 0)


def test_images_are_decoded_where_their_memory_cannot_be_page_locked(monkeypatch):
    machine, empty, refused = Machine(monkeypatch, MIXED), torch.empty, []
    allocated = decoder.allocate_pixels

    def refusing(length, device, dtype=torch.uint8, *, pin_memory=False):
        if pin_memory:
            refused.append(length)
            raise decoder.HostMemoryError("CUDA error: out of memory\nCompile with more")
        return allocated(length, device) if device.type == "cuda" else empty(length, dtype=torch.uint8)

    monkeypatch.setattr(decoder, "allocate_pixels", refusing)
    with pytest.warns(GpuAugWarning) as caught:
        history = machine.train()
    assert not history.violations, history.report()
    assert machine.loader.stats().batches == 3 * BATCHES
    (text,) = (str(warning.message) for warning in caught)
    assert text == (
        "Copies of decoded images make the decoder wait, because 0.0 MB could not be page-locked (CUDA error: out of memory). "
        "Lower depth, or batch_size of the DataLoader."
    )
    assert len(refused) == 1
    assert machine.loader.stats().pinned_bytes == Slots.pinned_bytes
