"""``DecodeStage`` in a loader: pixels, order, bad files, threads. On the CPU, and on a GPU with JPEG engines."""

import subprocess
import sys
from collections import namedtuple
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support import internals
from support.comparison.values import assert_values
from support.files import nvjpeg_double
from support.files.decode_devices import ON_CARD, by_each_decoder, on_each_device
from support.files.encoded import by_pil, encoded, mixed_files, psnr_db
from support.process.processes import run_interpreter
from support.process.waiting import WAIT_S
from support.video.videos import video
from torch.utils.data import DataLoader

import gpuaug
from gpuaug import DecodeStage, StreamedLoader, collate_encoded, read_clip
from gpuaug.core.errors import ArgumentTypeError, DecodeError
from gpuaug.core.packed_targets import pack_targets
from gpuaug.core.streams import Lane, Lanes
from gpuaug.decode import decoder

FILES = mixed_files()

LEAST_DB = 50.0
"""nvJPEG rounds otherwise than libjpeg-turbo: values differ by up to 3."""

LEAST_HALVED_DB = 30.0
"""The CPU makes a JPEG smaller by its coefficients, and not by the mean of pixels."""


class Files:
    """A dataset of the bytes of files and their numbers."""

    def __init__(self, files, repeat=1):
        self.files, self.repeat = files, repeat

    def __len__(self):
        return len(self.files) * self.repeat

    def __getitem__(self, index):
        return self.files[index % len(self.files)], index


def loader(files=FILES, *stages, repeat=2, batch_size=8, workers=0, **options):
    data = DataLoader(Files(files, repeat), batch_size=batch_size, num_workers=workers, collate_fn=collate_encoded)
    return StreamedLoader(data, [DecodeStage(), *stages] if not (stages and stages[0] is None) else stages[1:], **options)


@pytest.mark.parametrize("container", [dict, tuple])
@pytest.mark.parametrize(
    "make",
    [
        lambda on: DecodeStage(),
        lambda on: DecodeStage(on=on),
        lambda on: gpuaug.TransformStage(torch.negative, on=on),
        lambda on: gpuaug.FeatureStage(torch.nn.Identity(), on=on),
    ],
)
def test_packed_targets_in_any_batch_that_a_stage_reads(make, container):
    record = {"boxes": torch.zeros(2, 4), "labels": torch.zeros(2)}
    members = {"image": torch.zeros(9, 3), "target": [record] * 9}
    batch = members if container is dict else tuple(members.values())
    packed = pack_targets(batch, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    stage = make("image" if container is dict else 0).bind("stage", Lanes(torch.device("cpu")))
    stage.read(packed)
    assert not stage.reads_pending(packed)


def test_images_in_a_subclass_of_a_user_are_decoded():
    class Photos(gpuaug.Encoded):
        pass

    files = collate_encoded(FILES[:2])
    for image, wanted in zip(*(DecodeStage()(each, "cpu") for each in (Photos(files.data, files.headers), files)), strict=True):
        assert torch.equal(image, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("locks", [True, False])
def test_images_that_the_cpu_decodes_are_the_same_without_page_locks(monkeypatch, locks):
    empty = decoder.allocate_pixels

    def refusing(*args, pin_memory=False):
        if pin_memory and not locks:
            raise decoder.HostMemoryError("CUDA error: out of memory")
        return empty(*args, pin_memory=pin_memory)

    monkeypatch.setattr(decoder, "allocate_pixels", refusing)
    with nullcontext() if locks else pytest.warns(gpuaug.GpuAugWarning, match="make the decoder wait"):
        streamed = loader(FILES, None, DecodeStage(backend="cpu"), device="cuda")
        for images, numbers in streamed:
            for image, number in zip(images, numbers.tolist(), strict=True):
                assert_equal_to_pil(image, FILES[number % len(FILES)], "cpu")
            assert locks or internals.shared(streamed).device_setup.held_bytes().pinned == 0


def assert_equal_to_pil(image, file, device, **how):
    """An image of a Ragged, (C, h, w), is what PIL decodes; of engines nearly so."""
    got, wanted = image.permute(1, 2, 0).cpu().numpy(), by_pil(file, **how)
    assert got.shape == wanted.shape
    if device == "cpu":
        assert np.array_equal(got, wanted)
    else:
        assert psnr_db(got, wanted) > LEAST_DB


@on_each_device
@pytest.mark.parametrize(("workers", "feed", "depth"), [(0, "auto", 2), (0, "auto", 0), (2, "ring", 2)])
def test_images_are_those_of_pil(device, workers, feed, depth):
    seen = []
    for images, numbers in loader(repeat=2, workers=workers, feed=feed, depth=depth, device=device):
        for image, number in zip(images, numbers.tolist(), strict=True):
            assert_equal_to_pil(image, FILES[number % len(FILES)], device)
            seen.append(number)
    assert seen == list(range(2 * len(FILES)))


@on_each_device
def test_exif_may_be_left_out(device):
    file = encoded(40, 24, orientation=6)
    (upright,) = DecodeStage()(collate_encoded([file]), device)
    (stored,) = DecodeStage(exif=False)(collate_encoded([file]), device)
    assert (upright.shape, stored.shape) == ((3, 40, 24), (3, 24, 40))
    assert_equal_to_pil(stored, file, device, upright=False)


@on_each_device
def test_one_channel_is_the_luma(device):
    files = [encoded(40, 24, seed=1), encoded(41, 25, mode="L"), encoded(20, 20, "PNG")]
    for image, file in zip(DecodeStage(channels=1)(collate_encoded(files), device), files, strict=True):
        assert_equal_to_pil(image, file, device, mode="L")


@on_each_device
def test_min_side_halves_while_the_short_side_is_long_enough(device):
    files = [encoded(width, height, quality=95) for width, height in ((131, 65), (129, 64), (127, 63), (260, 257))]
    files.append(encoded(200, 200, "PNG"))
    images = list(DecodeStage(min_side=32)(collate_encoded(files), device))
    assert [image.shape[1:] for image in images] == [(33, 66), (32, 65), (32, 64), (33, 33), (200, 200)]
    halved = by_pil(files[0])[:64, :130].reshape(32, 2, 65, 2, 3).mean((1, 3)).round().astype(np.uint8)
    assert psnr_db(images[0][:, :32, :65].permute(1, 2, 0).cpu().numpy(), halved) > LEAST_HALVED_DB


@on_each_device
def test_images_are_decoded_in_the_consumers_inference_mode(device):
    with torch.inference_mode():
        for images, numbers in loader(repeat=1, device=device):
            assert not images.data.is_inference()  # threads write to it outside of that mode
            for image, number in zip(images, numbers.tolist(), strict=True):
                assert_equal_to_pil(image, FILES[number], device)


Sample = namedtuple("Sample", "image, label, boxes, name")


@on_each_device
def test_bad_samples_are_replaced_in_every_member(device, caplog):
    files = [encoded(40 + number, 30, seed=number) for number in range(5)]
    files[0], files[3] = b"", files[3][: len(files[3]) // 2]
    samples = [
        Sample(file, number, {"boxes": torch.full((number, 4), number)}, str(number)) for number, file in enumerate(files)
    ]
    batch = collate_encoded(samples)
    (got,) = StreamedLoader([batch], [DecodeStage(on="image", on_error="replace")], device=device)
    taken = [4, 1, 2, 2, 4]
    assert got.label.tolist() == taken
    assert got.name == [str(number) for number in taken]
    assert [len(each["boxes"]) for each in got.boxes] == taken
    for image, number in zip(got.image, taken, strict=True):
        assert_equal_to_pil(image, files[number], device)
    assert "sample 0: it is empty; sample 3: " in caplog.text


def test_devices_without_cuda_get_images_and_clips_that_the_cpu_decodes(monkeypatch):
    copied = []

    def copy_parts(lane, target, source, parts):
        assert target.is_meta
        copied.append(torch.cat([source[start : start + length] for _, start, length in parts]))

    monkeypatch.setattr(torch, "meta", SimpleNamespace(is_available=lambda: True), raising=False)  # in place of MPS or XPU
    monkeypatch.setattr(Lane, "copy_parts", copy_parts)
    clips = [(read_clip(video(), 3, start=start), 0) for start in (0, 9)]
    for encoded_files in (collate_encoded(FILES), collate_encoded(clips)[0]):
        want, got = (DecodeStage()(encoded_files, device) for device in ("cpu", "meta"))
        assert len(got) == len(want)
        assert got.device.type == "meta"
        values = want.data if isinstance(want, gpuaug.Ragged) else want.permute(0, 1, 3, 4, 2).flatten()
        assert_values(copied.pop(), values)


@on_each_device
def test_a_bad_file_is_raised_at_its_batch_with_its_name(device, tmp_path):
    path = tmp_path / "broken.jpg"
    path.write_bytes(FILES[0][:100])
    good = tmp_path / "good.jpg"
    good.write_bytes(FILES[0])
    paths = [good, good, good, path, good, path]
    streamed = StreamedLoader(DataLoader(paths, batch_size=2, collate_fn=collate_encoded), [DecodeStage()], device=device)
    batches = iter(streamed)
    assert len(next(batches)) == 2
    with pytest.raises(DecodeError) as raised:
        next(batches)
    assert f"because of sample 1 ({path}): it ends within its header. " in str(raised.value)
    assert raised.value.__notes__ == ["gpuaug: raised in stage 'decode', at batch 1 of epoch 0."]
    assert len(next(iter(streamed))) == 2


@on_each_device
def test_what_only_the_decoder_finds_is_bad_too(device):
    broken = bytearray(encoded(64, 48, seed=1))
    table = broken.find(b"\xff\xc4")
    broken[table + 5 : table + 21] = b"\xff" * 16  # more Huffman codes than there can be
    files = [encoded(40, 24), bytes(broken), encoded(33, 44, "PNG")]
    images = DecodeStage(on_error="replace")(collate_encoded(files), device)
    for image, file in zip(images, [files[0], files[0], files[2]], strict=True):
        assert_equal_to_pil(image, file, device)
    with pytest.raises(DecodeError, match=r"because of sample 1: (nvJPEG finds: bad JPEG|[A-Za-z]+Error: )"):
        DecodeStage()(collate_encoded(files), device)


@on_each_device
def test_a_header_that_lies_is_found(device):
    batch = collate_encoded([FILES[0], FILES[8], FILES[9]])
    batch.headers.table["height"][1] += 8  # an image that is written whole would leave its place
    engines, cpu = "nvJPEG finds 50x37 pixels and its header 50x45", "it decodes to 50x37 pixels, but its header says 50x45"
    with pytest.raises(DecodeError, match=rf"because of sample 1: ({engines}|{cpu})\."):
        DecodeStage()(batch, device)


@on_each_device
def test_images_of_too_many_pixels_are_not_decoded(device):
    files = [encoded(40, 24), encoded(50, 30, "PNG")]
    with pytest.raises(DecodeError, match="because of sample 1: its 50x30 pixels are more than max_pixels=1000"):
        DecodeStage(max_pixels=1000)(collate_encoded(files), device)


# Engines.


@pytest.fixture
def poisoned(monkeypatch):
    monkeypatch.setattr(decoder, "POISON", 0xAA)


@by_each_decoder
@pytest.mark.usefixtures("poisoned")
def test_decoders_write_memory_when_its_readers_are_done(device):
    files = [encoded(200 + 8 * number, 160, seed=number) for number in range(32)]

    def late(images):
        torch.cuda._sleep(20_000_000)
        return [image.clone() for image in images]

    def epoch(depth, last):
        found = []
        for images, _ in loader(files, last, repeat=4, device="cuda", depth=depth):
            torch.cuda._sleep(10_000_000)
            found.append([image.cpu() for image in images])
            del images
        return found

    reference = epoch(0, lambda images: list(images))
    for depth in (1, 2, 3):
        for got, wanted in zip(epoch(depth, late), reference, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.gpu
def test_processes_may_share_the_engines():
    test = f"{__file__}::{test_decoders_write_memory_when_its_readers_are_done.__name__}"
    # Four of these wait for each other for ever where a call begins before the card has done all of the one before it.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    with ExitStack() as stack:
        running = [stack.enter_context(subprocess.Popen(command)) for _ in range(4)]
        try:
            assert [process.wait(WAIT_S) for process in running] == [0] * 4
        finally:
            for process in running:
                process.kill()


@by_each_decoder
@pytest.mark.usefixtures("poisoned")
def test_batches_may_be_kept(device):
    files = [encoded(200, 160, seed=number) for number in range(8)]
    kept = [images for images, _ in loader(files, repeat=8, device="cuda")]
    for images in kept:
        for image, file in zip(images, files, strict=True):
            assert_equal_to_pil(image, file, "cuda")


@by_each_decoder
def test_graphs_that_the_user_captures_survive_growing_batches(device):
    batches = [collate_encoded([encoded(64, 48, seed=number) for number in range(count)]) for count in (1, 4, 16, 64, 128, 256)]
    x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    found = iter(StreamedLoader(batches, [DecodeStage()], device="cuda", depth=4))
    next(found)
    with torch.cuda.graph(graph):  # while batches that were submitted are decoded
        y = x * 2 + 1
    graph.replay()
    assert y.tolist() == [1.0] * 8
    assert [len(images) for images in found] == [4, 16, 64, 128, 256]


@by_each_decoder
def test_the_decoder_of_an_image_follows_from_its_header(device):
    decode = DecodeStage()
    both, alone = (decode(collate_encoded(files), "cuda") for files in (FILES, FILES[:1]))
    assert torch.equal(both[0], alone[0])
    cpu = DecodeStage(backend="cpu")(collate_encoded(FILES), "cuda")
    for image, file in zip(cpu, FILES, strict=True):
        assert_equal_to_pil(image, file, "cpu")
    for index in (11, 15):  # a JPEG in CMYK and a file of another format
        assert torch.equal(both[index], cpu[index])


DIGEST = """
import hashlib
from support.files.encoded import mixed_files
from gpuaug import DecodeStage, collate_encoded

images = DecodeStage(backend="BACKEND")(collate_encoded(mixed_files()), "cuda")
print(hashlib.sha256(images.data.cpu().numpy().tobytes()).hexdigest())
"""


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ON_CARD)
def test_pixels_are_equal_in_two_processes(backend):
    runs = [run_interpreter(DIGEST.replace("BACKEND", backend)) for _ in range(2)]
    assert [run.stderr for run in runs if run.returncode] == []
    assert runs[0].stdout == runs[1].stdout


@by_each_decoder
@pytest.mark.slow
def test_batches_of_more_than_two_to_the_31_values(device):
    files = [encoded(4000, 3000, seed=number % 4, quality=60) for number in range(4)] * 16
    augment = gpuaug.fuse([K.CenterCrop((64, 64))], ragged=True)
    whole = DecodeStage()(collate_encoded(files), "cuda")
    assert len(whole.data) > 2**31
    parts = [DecodeStage()(collate_encoded(files[start : start + 4]), "cuda") for start in (0, 60)]
    assert torch.equal(whole[63], parts[1][3])
    got = augment(whole)
    assert torch.equal(got[:4], augment(parts[0]))
    assert torch.equal(got[60:], augment(parts[1]))


@pytest.mark.parametrize("given", [(1, 2), torch.zeros(3, 4)])
def test_call_takes_encoded_images_alone(given):
    with pytest.raises(ArgumentTypeError) as caught:
        DecodeStage()(given, "cpu")
    got = "(1, 2)" if isinstance(given, tuple) else "Tensor of shape (3, 4)"
    way_out = "Pass a member of a batch that gpuaug.collate_encoded returned."
    assert str(caught.value) == f"encoded must be a gpuaug.Encoded, got {got}. {way_out}"


def test_version_names_the_decoders(monkeypatch):
    def version(stage):
        bound = stage.bind("jpeg", Lanes(torch.device("cpu")))
        assert bound.versions() == {}, "no image has arrived"
        return bound.versions(["jpeg"])["jpeg"]

    by_cpu = version(DecodeStage())
    assert by_cpu.startswith("cpu: ")
    nvjpeg_double.use(monkeypatch)
    assert version(DecodeStage()) == f"engines: nvJPEG double; hybrid: nvJPEG double; {by_cpu}"
