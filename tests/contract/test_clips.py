"""The contract for a column of clips: as tensors, and from video files that a ``DecodeStage`` decodes."""

from functools import cache

import kornia.augmentation as K
import pytest
import torch
from support.comparison.values import assert_values
from support.video.videos import video
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import gpuaug
from gpuaug import DecodeError, DecodeStage, StreamedLoader, TransformStage, collate_encoded, read_clip

COUNT, FRAMES = 7, 3

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SOURCES = ["tensors", "files"]
pytestmark = pytest.mark.filterwarnings("ignore:The copy of a batch does not overlap")  # tensors are not page-locked
CAMERAS = ("top", "wrist")


def clips(bad=()):
    """A sample for each start in a video: clips of two cameras, an action and a text. Bad samples have a damaged ``wrist``."""
    files = {"top": video(), "wrist": video(name="second.mp4", seed=1)}
    for start in range(COUNT):
        chosen = {name: read_clip(path, FRAMES, 2, start=start) for name, path in files.items()}
        if start in bad:
            chosen["wrist"] = read_clip(b"no video", FRAMES)
        yield {**chosen, "action": torch.tensor([float(start)]), "text": f"number {start}"}


@cache
def decoded():
    """The same samples as tensors, in batches."""
    loaded = DataLoader(list(clips()), 2, collate_fn=collate_encoded)
    return [{**batch, **{name: DecodeStage(backend="cpu")(batch[name], "cpu") for name in CAMERAS}} for batch in loaded]


def augment():
    noise = K.RandomGaussianNoise(0.0, 0.1, p=1.0)
    return K.VideoSequential(K.RandomResizedCrop((24, 24)), K.ColorJiggle(0.4, 0.4), noise, data_format="BTCHW")


def loader(source, device, *, bad=(), on_error="raise", **options):
    own = {"generator": torch.Generator()}  # else a DataLoader draws from torch's
    data = decoded() if source == "tensors" else DataLoader(list(clips(bad)), 2, collate_fn=collate_encoded, **own)
    both = TransformStage(gpuaug.fuse(v2.RandomCrop(32)), on=dict.fromkeys(CAMERAS, "input"), name="both")
    stages = [both, TransformStage(gpuaug.fuse(augment()), on="wrist", name="wrist")]
    if source == "files":
        stages.insert(0, DecodeStage(on_error=on_error))
        if device == "cuda":
            pytest.importorskip("PyNvVideoCodec")
    return StreamedLoader(data, stages, device=device, **{"seed": 3, **options})


def value(batch):
    return {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in batch.items()}


def values(batches):
    return [value(batch) for batch in batches]


def values_until(error, batches, match):
    """The batches that arrive before the error."""
    found, iterator = [], iter(batches)
    with pytest.raises(error, match=match):
        found.extend(value(next(iterator)) for _ in iter(int, 1))
    return found


def assert_same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        assert batch["text"] == other["text"]
        for name in (*CAMERAS, "action"):
            assert_values(batch[name], other[name])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("device", DEVICES)
def test_batches_are_complete_and_equal_to_the_reference_at_every_depth(source, device):
    reference = loader(source, device, depth=0)
    epochs = [values(reference) for _ in range(2)]
    for batches in epochs:
        assert [text for batch in batches for text in batch["text"]] == [f"number {number}" for number in range(COUNT)]
        assert [batch["wrist"].shape for batch in batches] == [(2, FRAMES, 3, 24, 24)] * 3 + [(1, FRAMES, 3, 24, 24)]
    assert not torch.equal(epochs[0][0]["wrist"], epochs[1][0]["wrist"])
    for depth in (1, 50):
        other = loader(source, device, depth=depth)
        kept = [[], []]
        for batches, want in zip(kept, epochs, strict=True):
            copies = []
            for batch in other:
                batches.append(batch)
                copies.extend(values([batch]))
            assert_same(copies, want)
        for batches, want in zip(kept, epochs, strict=True):
            assert_same(batches, want)


def test_files_give_what_their_frames_give_as_tensors():
    assert_same(values(loader("files", "cpu")), values(loader("tensors", "cpu")))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_bad_clip_is_an_error_at_its_batch_or_its_whole_sample_is_replaced_and_counted(device, depth):
    good = values(loader("files", device, depth=0))
    failing = loader("files", device, bad=[3], depth=depth)
    assert_same(values_until(DecodeError, failing, "because of sample 1: FFmpeg says"), good[:1])
    replacing = loader("files", device, bad=[3, 6], on_error="replace", depth=depth)
    found = values_until(DecodeError, replacing, "needs at least one sample per batch")  # the last batch is one sample
    assert [text for batch in found for text in batch["text"]] == [f"number {number}" for number in (0, 1, 2, 2, 4, 5)]
    assert found[1]["action"].tolist() == [[2.0], [2.0]]
    assert replacing.stats().replaced == 1
    assert_same([found[0], found[2]], [good[0], good[2]])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("device", DEVICES)
def test_resume_is_exact(source, device):
    whole = values(loader(source, device))
    for stop in (1, 3):
        stopped = loader(source, device)
        iterator = iter(stopped)
        for _ in range(stop):
            next(iterator)
        state = stopped.state_dict()
        iterator.close()
        resumed = loader(source, device, seed=None)
        resumed.load_state_dict(state)
        assert_same(values(resumed), whole[stop:])
