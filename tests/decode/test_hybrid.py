"""The hybrid decoder on a double of nvJPEG: states go from image to image, whatever fails."""

import threading
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.files import nvjpeg_double
from support.files.encoded import by_pil, encoded
from support.files.nvjpeg_double import PhasedDecoder, content
from support.process.waiting import WAIT_S

from gpuaug import DecodeError, DecodeStage, StreamedLoader, collate_encoded
from gpuaug.core.encoded import HEADER, Encoded, Format
from gpuaug.core.streams import Lanes
from gpuaug.decode import decoder as decoder_module
from gpuaug.decode import nvjpeg
from gpuaug.decode.decoder import Decoder
from gpuaug.decode.decoders import hybrid, registry
from gpuaug.decode.decoders.base import Pools, Resources
from gpuaug.decode.layout import Layout

FILES = [encoded(40 + number, 30, seed=number, progressive=number % 2 == 0) for number in range(9)]


@pytest.fixture(params=[(1, 1), (2, 1), (3, 4), (64, 4)], ids="{0[0]}-{0[1]}".format)
def decoder(request, monkeypatch):
    """Hybrid decoder with these maximum numbers of states, and of images per call of the host phases. Stages use it."""
    max_states, max_images = request.param
    monkeypatch.setattr(hybrid, "MAX_STATES", max_states)
    nvjpeg_double.use(monkeypatch)
    monkeypatch.setattr(hybrid, "MAX_IMAGES", max_images)
    return registry.find("hybrid", "a device")["hybrid"]


one_decoder = pytest.mark.parametrize("decoder", [(2, 4)], indirect=True, ids=["2-4"])
"""For tests in which the numbers of states and of images per call do not matter."""


def decoded(files, members=1, **options):
    batches = [[*(collate_encoded(files[number:] + files[:number]) for number in range(members)), torch.arange(len(files))]]
    ((*images, _),) = StreamedLoader(batches, [DecodeStage(backend="hybrid", threads=3, **options)], device="cpu")
    return images


def all_idle(decoder):
    return all(pool.idle.qsize() == len(pool.states) <= hybrid.MAX_STATES for pool in decoder._pools.values())


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("members", [1, 2])
def test_images_are_decoded_with_as_few_states_as_there_are(decoder, members, channels, monkeypatch):
    monkeypatch.setattr(decoder_module, "POISON", 0xAA)
    for number, images in enumerate(decoded(FILES, members, channels=channels)):
        for image, file in zip(images, FILES[number:] + FILES[:number], strict=True):
            wanted = by_pil(file, mode="RGB" if channels == 3 else "L").reshape(image.permute(1, 2, 0).shape)
            assert np.array_equal(image.permute(1, 2, 0).numpy(), wanted)
    assert all_idle(decoder)


@one_decoder
def test_images_are_turned_and_made_smaller(decoder):
    files = [encoded(64, 40, orientation=6, progressive=True), encoded(64, 64)]
    (images,) = decoded(files, min_side=32)
    assert [tuple(image.shape) for image in images] == [(3, 64, 40), (3, 32, 32)]
    assert np.array_equal(images[0].permute(1, 2, 0).numpy(), by_pil(files[0]))
    assert all_idle(decoder)


@pytest.mark.parametrize("found_by", ["host_phase", "card_phase"])
def test_a_damaged_file_is_an_error_or_is_replaced(decoder, monkeypatch, found_by):
    host_phase, card_phase = PhasedDecoder.host_phase, PhasedDecoder.card_phase

    def on_host(double, state, file):
        state.damaged = content(file) == FILES[3]
        refused = state.damaged and found_by == "host_phase"
        return "nvJPEG finds: bad JPEG" if refused else host_phase(double, state, file)

    def on_card(double, state, file):
        return "nvJPEG finds: bad JPEG" if state.damaged else card_phase(double, state, file)

    monkeypatch.setattr(PhasedDecoder, "host_phase", on_host)
    monkeypatch.setattr(PhasedDecoder, "card_phase", on_card)
    with pytest.raises(DecodeError, match=r"because of sample 3: nvJPEG finds: bad JPEG\."):
        decoded(FILES)
    assert all_idle(decoder)
    (images,) = decoded(FILES, on_error="replace")
    assert torch.equal(images[3], images[2])
    assert all_idle(decoder)


@pytest.mark.parametrize("phase", ["host_phase", "card_phase"])
def test_a_failure_of_the_library_is_raised_and_leaves_the_states(decoder, monkeypatch, phase):
    calls, original = [], getattr(PhasedDecoder, phase)

    def failing(*arguments):
        calls.append(1)
        if len(calls) in (3, 5):
            raise nvjpeg.NvJpegError("a call", 6)
        return original(*arguments)

    monkeypatch.setattr(PhasedDecoder, phase, failing)
    with pytest.raises(nvjpeg.NvJpegError, match=r"a call must succeed, got status 6"):
        decoded(FILES)
    assert len(calls) == len(FILES), "all images of the batch end before its error is raised"
    assert all_idle(decoder)
    assert len(decoded(FILES)[0]) == len(FILES)


def test_bytes_of_its_states_are_counted(decoder):
    decoded(FILES)
    made = sum(len(pool.states) for pool in decoder._pools.values())
    assert decoder.held_bytes == (made, 2 * made)


@one_decoder
def test_stats_count_the_bytes_of_its_states(decoder):
    streamed = StreamedLoader([[collate_encoded(FILES), 0]], [DecodeStage(backend="hybrid")], device="cpu")
    (images, _) = next(iter(streamed))
    assert min(decoder.held_bytes) > 0
    assert streamed.stats().pinned_bytes == decoder.held_bytes[0]
    assert streamed.stats().decode_bytes == decoder.held_bytes[1] + images.data.untyped_storage().nbytes()


def test_it_decodes_while_the_engines_do(monkeypatch):
    begun = threading.Event()

    class Engines(nvjpeg_double.BatchDecoder):
        def decode_call(self, *arguments):
            assert begun.wait(5)
            return super().decode_call(*arguments)

    class Phased(nvjpeg_double.PhasedDecoder):
        def host_phase(self, *arguments):
            begun.set()
            return super().host_phase(*arguments)

    nvjpeg_double.use(monkeypatch, Engines, Phased)
    ((images, _),) = StreamedLoader([[collate_encoded(FILES), 0]], [DecodeStage()], device="cpu")
    assert len(images) == len(FILES)


@one_decoder
def test_files_that_it_takes_follow_from_the_header(decoder):
    table = collate_encoded([FILES[0], FILES[1], encoded(30, 20, mode="CMYK"), encoded(30, 20, "PNG")]).headers.table
    assert decoder.takes(table).tolist() == [True, True, False, False]
    large = table[:2].copy()
    large["height"], large["width"] = 4096, 8192
    assert decoder.takes(large).tolist() == [True, True]
    large["width"] += 1
    assert decoder.takes(large).tolist() == [False, False]


def large_table(count):
    """Headers of baseline JPEGs of 12 megapixels, with lengths as of photographs."""
    table = np.repeat(collate_encoded([FILES[1]]).headers.table, count)
    table["height"], table["width"] = 3000, 4000
    table["length"] = np.random.default_rng(0).integers(2_000_000, 4_000_000, count)
    return table


@one_decoder
def test_a_share_of_the_large_baseline_files_is_not_left_to_the_engines(decoder):
    table = large_table(4000)
    for lengths in (table["length"], table["length"] // 4096 * 4096):  # in blocks of 4096 bytes, too
        table["length"] = lengths
        first = decoder.takes_first(table)
        assert abs(first.mean() - hybrid.LARGE_SHARE) < 0.03
        some = range(0, len(table), 20)
        assert np.array_equal(first[some], [decoder.takes_first(table[number : number + 1])[0] for number in some])
    others = table[first]
    others["width"] = 1000
    assert not decoder.takes_first(others).any()
    others["width"], others["format"] = 4000, Format.PROGRESSIVE_JPEG
    assert not decoder.takes_first(others).any()


@one_decoder
def test_files_that_are_taken_first_are_decoded_by_the_hybrid_decoder_if_there_is_one(decoder):
    engines, cpu = nvjpeg_double.ON_CARD
    headers, options = SimpleNamespace(table=large_table(100)), DecodeStage().options
    first = decoder.takes_first(headers.table)
    assert np.array_equal(Layout(headers, options, [engines, decoder, cpu]).decoders, first)
    few_threads = replace(options, divides_large_files=False)
    assert not Layout(headers, few_threads, [engines, decoder, cpu]).decoders.any()
    assert not Layout(headers, options, [engines, cpu]).decoders.any()
    assert not Layout(headers, options, [decoder, cpu]).decoders.any()


@pytest.mark.parametrize("threads", [1, 6, 7, 8])
def test_large_files_are_divided_only_if_there_are_enough_threads(monkeypatch, threads):
    nvjpeg_double.use(monkeypatch)
    monkeypatch.setattr(hybrid, "LARGE_PIXELS", 1)
    monkeypatch.setattr(hybrid, "LARGE_SHARE", 1)
    phased = []
    card_phase = PhasedDecoder.card_phase
    monkeypatch.setattr(PhasedDecoder, "card_phase", lambda *call: phased.append(1) or card_phase(*call))
    list(StreamedLoader([[collate_encoded(FILES[1::2]), 0]], [DecodeStage(threads=threads)], device="cpu"))
    assert len(phased) == (len(FILES[1::2]) if threads >= 7 else 0)


@pytest.mark.parametrize(
    ("threads", "max_bytes", "counts"), [(3, 2**21, [9]), (9, 2**21, [3, 3, 3]), (99, 2**21, [1] * 9), (3, 1, [1] * 9)]
)
def test_calls_of_host_phases_share_the_batch_and_have_few_bytes(monkeypatch, threads, max_bytes, counts):
    nvjpeg_double.use(monkeypatch)
    monkeypatch.setattr(hybrid, "MAX_IMAGES", 32)
    numbers, host_phases = [], PhasedDecoder.host_phases
    monkeypatch.setattr(
        PhasedDecoder, "host_phases", lambda double, *lists: numbers.append(len(lists[0])) or host_phases(double, *lists)
    )
    monkeypatch.setattr(hybrid, "MAX_CALL_BYTES", max_bytes)
    list(StreamedLoader([[collate_encoded(FILES), 0]], [DecodeStage(backend="hybrid", threads=threads)], device="cpu"))
    assert numbers == counts


@one_decoder
def test_the_longest_files_begin(decoder, monkeypatch):
    host_phase, lengths = PhasedDecoder.host_phase, []
    monkeypatch.setattr(PhasedDecoder, "host_phase", lambda *call: lengths.append(int(call[2]["length"])) or host_phase(*call))
    batch = [collate_encoded(FILES), 0]
    list(StreamedLoader([batch], [DecodeStage(backend="hybrid", threads=1)], device="cpu"))
    assert lengths == sorted(map(len, FILES), reverse=True)


def test_a_batch_that_waits_for_a_lane_holds_no_state(decoder):
    lanes = Lanes(torch.device("cpu"))
    scheduled = Decoder("decode", lanes, DecodeStage().options, lambda _: [decoder])
    batch, pools, idle = scheduled.allocate(collate_encoded(FILES), {}), Pools(2), SimpleQueue()
    try:
        future = pools.batches.submit(decoder.begin(batch, np.arange(len(FILES)), Resources(lanes, lanes.copy, idle, pools)))
        pools.batches.submit(pools.images.submit(int).result).result(WAIT_S)
        assert not decoder._pools
        idle.put(lanes.copy)
        future.result(WAIT_S)
        assert idle.get_nowait() is lanes.copy
        assert all_idle(decoder)
    finally:
        idle.put(lanes.copy)
        pools.close()


@pytest.mark.parametrize(("h", "v"), [(1, 1), (2, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("channels", [1, 3])
def test_capacity_holds_the_coefficients_of_whole_blocks(h, v, channels):
    sides = np.array([1, 15, 16, 17, 333, 1000, 4097, 16384])
    table = np.zeros((len(sides), len(sides)), HEADER)
    table["height"], table["width"], table["channels"], table["sampling"] = sides[:, None], sides, channels, 4 * h + v
    table = table.ravel()
    units = -(-table["height"].astype(int) // (8 * v)) * -(-table["width"].astype(int) // (8 * h))
    needed = 2 * 64 * units * (h * v + (2 if channels == 3 else 0))
    capacities = hybrid._capacities(table)
    assert (capacities >= 1.2 * needed).all()
    square = np.minimum(table["height"], table["width"]) >= 333
    assert (capacities <= np.maximum(6 * needed, hybrid.MIN_CAPACITY))[square].all()
    assert (capacities & (capacities - 1) == 0).all()


def test_each_image_gets_a_state_of_its_capacity_and_backend(decoder, monkeypatch):
    monkeypatch.setattr(hybrid, "MIN_CAPACITY", 1)
    monkeypatch.setattr(hybrid, "CARD_HUFFMAN_PIXELS", 64 * 64)
    state, host_phase, bytes_by_state = PhasedDecoder.state, PhasedDecoder.host_phase, {}

    def made(single, *sizes):
        new = state(single, *sizes)
        bytes_by_state[id(new)] = sizes
        return new

    def checked(double, used, file):
        on_card = used.backend == nvjpeg.GPU_HYBRID
        assert on_card == (file["height"] in (64, 300))
        capacity = capacities[file["height"], file["width"]]
        assert bytes_by_state[id(used)] == (capacity // 4 if on_card else capacity, capacity * 3 // 2)
        return host_phase(double, used, file)

    monkeypatch.setattr(PhasedDecoder, "state", made)
    monkeypatch.setattr(PhasedDecoder, "host_phase", checked)
    files = [encoded(side, side, seed=side, progressive=side == 600) for side in (16, 600, 64, 300)]
    table = collate_encoded(files).headers.table
    capacities = dict(
        zip(zip(table["height"].tolist(), table["width"].tolist(), strict=True), hybrid._capacities(table), strict=True)
    )
    assert len(set(capacities.values())) == 3
    assert len(decoded(files)[0]) == 4


@one_decoder
def test_there_is_a_lane_for_each_call_that_may_run_at_once(decoder):
    (engines, *_), lanes = nvjpeg_double.ON_CARD, Lanes(torch.device("cpu"))
    scheduled = Decoder("decode", lanes, DecodeStage().options, lambda _: [engines, decoder])
    scheduled.decoders_of(Encoded)
    idle = scheduled._idle_card_lanes
    assert len({idle.get_nowait() for _ in range(idle.qsize())}) == engines.max_calls + decoder.max_calls


def test_fewer_states_have_a_large_capacity():
    powers = range(21, 29)
    assert [hybrid.max_states(nvjpeg.HYBRID, 2**power) for power in powers] == [96, 96, 64, 32, 16, 8, 4, 4]
    assert [hybrid.max_states(nvjpeg.GPU_HYBRID, 2**power) for power in powers] == [96, 96, 96, 64, 32, 16, 8, 4]


@one_decoder
def test_an_error_of_the_compilation_is_raised_at_its_batch(decoder, monkeypatch):
    def fail(*_):
        raise MemoryError("of the compiler")

    monkeypatch.setattr(PhasedDecoder, "host_phases", fail)
    with pytest.raises(MemoryError, match="of the compiler"):
        decoded(FILES)
    assert all_idle(decoder)
