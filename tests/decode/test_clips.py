"""Clips of videos: their frames and pixels are PyAV's, whatever the container and the codec."""

import io
import itertools
import random
from contextlib import suppress
from functools import cache
from pathlib import Path

import av
import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support.process.memory import memory_that_held
from support.video import nvdec_double
from support.video.videos import frames, video
from torch.utils.data import DataLoader
from torchvision import tv_tensors

import gpuaug
from gpuaug import DecodeError, DecodeStage, StreamedLoader, collate_encoded, read_clip
from gpuaug.decode.clips import limits, nal
from gpuaug.decode.clips.video_file import MAX_OPEN, VIDEOS, Video
from gpuaug.decode.layout import source_indices

X265 = ("x265-params", "keyint=12:bframes=3:log-level=none")

CASES = {
    "h264": {},
    "hevc": {"codec": "libx265", "options": (X265,)},
    "vp9": {"name": "vp9.webm", "codec": "libvpx-vp9", "options": (("g", "12"), ("cpu-used", "8"), ("deadline", "realtime"))},
    "lossless": {"name": "ffv1.mkv", "codec": "ffv1", "options": ()},
    "Matroska": {"name": "h264.mkv"},
    "fragments": {"name": "fragments.mp4", "container": (("movflags", "frag_keyframe+empty_moov"),)},
    "an open group of pictures": {"name": "open.mp4", "options": (("x264-params", "open-gop=1:keyint=12:bframes=3"),)},
    "no key frames but the first": {"name": "one-key.mp4", "options": (("g", "400"), ("bf", "3"))},
    "pictures that are refreshed little by little": {
        "name": "refresh.mp4",
        "options": (("x264-params", "intra-refresh=1:keyint=12:bframes=2"),),
    },
    "B-frames that others refer to": {"name": "pyramid.mp4", "options": (("g", "24"), ("bf", "7"), ("b-pyramid", "normal"))},
    "interlaced": {"name": "interlaced.mp4", "options": (("x264-params", "interlaced=1:keyint=12"),)},
    "10 bits": {"name": "deep.mp4", "pixels": "yuv420p10le"},
    "4:4:4 and odd sides": {"name": "odd.mp4", "pixels": "yuv444p", "height": 49, "width": 65},
    "BT.709": {"name": "bt709.mp4", "colorspace": 1, "color_range": 1},
    "BT.709 in full range": {"name": "bt709-full.mp4", "colorspace": 1, "color_range": 2},
    "BT.601 in full range": {"name": "bt601-full.mp4", "colorspace": 6, "color_range": 2},
    "turned left": {"name": "left.mp4", "rotation": 90},
    "turned right": {"name": "right.mp4", "rotation": -90},
    "upside down": {"name": "down.mp4", "rotation": 180},
    "variable frame rate": {"name": "variable.mp4", "times": tuple(number * 4 + number * number // 4 for number in range(40))},
}


def path_of(case):
    return video(**{"name": f"{case}.mp4", **CASES[case]})


def decoded(*clips, **options):
    """The frames of clips (B, T, 3, H, W) as an array (B, T, H, W, 3)."""
    made = DecodeStage(**options)(collate_encoded([(clip, 0) for clip in clips])[0], "cpu")
    return made.permute(0, 1, 3, 4, 2).numpy()


MOST_APART = 3
"""FFmpeg's conversion to RGB is off by up to three levels from the exact one, which clips of NVDEC have but for rounding."""


def apart(got, wanted):
    """Largest difference of two arrays."""
    return int(np.abs(got.astype(int) - wanted.astype(int)).max())


class Clips:
    """A dataset of clips and their numbers."""

    def __init__(self, *clips):
        self.clips = clips

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, index):
        return self.clips[index], index


def loader(clips, *, workers=0, batch_size=2, **options):
    data = DataLoader(Clips(*clips), batch_size=batch_size, num_workers=workers, collate_fn=collate_encoded)
    return StreamedLoader(data, [DecodeStage(**options)], device="cpu")


BY_CPU = {"lossless", "interlaced", "10 bits", "4:4:4 and odd sides"}
"""Cases that the engines do not decode."""


def clips_of(path):
    """First frames and clips of every fourth frame."""
    count, rng = len(frames(path)), random.Random(0)
    starts = [0, 1, count - 9, *(rng.randrange(count - 8) for _ in range(4))]
    return starts, [read_clip(path, 3, 4, start=start) for start in starts]


@pytest.mark.parametrize("engines", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_frames_and_pixels_are_those_of_pyav(case, engines, monkeypatch):
    decoder = nvdec_double.use(monkeypatch) if engines else None
    is_exact = not engines or case in BY_CPU
    path = path_of(case)
    starts, clips = clips_of(path)
    for start, clip in zip(starts, decoded(*clips), strict=True):
        assert apart(clip, frames(path)[start : start + 9 : 4]) <= (0 if is_exact else MOST_APART), start
    assert is_exact or len(decoder.sessions) > 0


def test_a_video_in_memory_is_as_a_file():
    path = path_of("h264")
    with open(path, "rb") as file:
        data = file.read()
    array = np.array(bytearray(data))
    for held in (data, bytearray(data), memoryview(data), array, torch.from_numpy(array)):
        assert np.array_equal(decoded(read_clip(held, 4, 3, start=5))[0], frames(path)[5:15:3])


def test_positions_reach_from_the_first_clip_to_the_last():
    path = path_of("h264")
    got = decoded(*(read_clip(path, 4, 3, at=at) for at in (0, 0.5, 0.999, 1)))
    for start, clip in zip((0, 15, 30, 30), got, strict=True):
        assert np.array_equal(clip, frames(path)[start : start + 10 : 3])


def test_a_video_that_is_too_short_is_looped_or_padded_or_an_error():
    path = path_of("h264")
    wanted = frames(path)
    looped = decoded(read_clip(path, 4, 4, start=30, short="loop"))[0]
    assert np.array_equal(looped, wanted[[30, 34, 38, 2]])
    assert np.array_equal(decoded(read_clip(path, 4, 4, start=30, short="pad"))[0], wanted[[30, 34, 38, 39]])
    assert np.array_equal(decoded(read_clip(path, times_s=[0, 99], short="pad"))[0], wanted[[0, 39]])
    assert np.array_equal(decoded(read_clip(path, 50, at=1, short="pad"))[0][[0, 49]], wanted[[0, 39]])
    for clip in (read_clip(path, 4, 4, start=30), read_clip(path, times_s=[0, 99]), read_clip(path, [40])):
        with pytest.raises(DecodeError, match=r"sample 0 \(.*\): it has 40 frames, and the clip needs frame \d+: pass short="):
            decoded(clip)


def test_a_loader_gives_clips_beside_labels():
    path = path_of("h264")
    clips = [read_clip(path, 4, 2, start=start) for start in range(6)]
    streamed = loader(clips, workers=2)
    for epoch in range(2):
        got = list(streamed)
        assert [label for _, labels in got for label in labels.tolist()] == [*range(6)], epoch
        for start, clip in enumerate(clip for batch, _ in got for clip in batch):
            assert clip.dtype == torch.uint8
            assert np.array_equal(clip.permute(0, 2, 3, 1).numpy(), frames(path)[start : start + 7 : 2])


class OpenVideos(Clips):
    """Number of videos that a worker has open, and of those of its parent that it has closed."""

    def __getitem__(self, index):
        return torch.tensor([len(VIDEOS.idle_videos), len(CLOSED)])


CLOSED = []
"""Videos that this process has closed."""


def test_a_worker_opens_videos_anew_and_does_not_close_those_of_its_parent(monkeypatch):
    """A forked process would share the position in the file, and wait for threads of the decoder, which it does not have."""
    decoded(read_clip(path_of("h264"), 2))
    assert len(VIDEOS.idle_videos) > 0
    monkeypatch.setattr(Video, "close", CLOSED.append)
    opened = DataLoader(OpenVideos(0), num_workers=1, multiprocessing_context="fork")
    assert next(iter(opened)).tolist() == [[0, 0]]


def test_few_videos_stay_open_and_a_changed_one_is_read_anew(tmp_path):
    for number in range(MAX_OPEN + 2):
        path = tmp_path / f"{number}.mp4"
        path.write_bytes(Path(video()).read_bytes())
        assert np.array_equal(decoded(read_clip(path, 2))[0], frames(video())[:2])
    assert len(VIDEOS.idle_videos) == MAX_OPEN
    other = video(name="second.mp4", seed=1)
    path.write_bytes(Path(other).read_bytes())
    assert np.array_equal(decoded(read_clip(path, 2))[0], frames(other)[:2])


def test_threads_that_use_a_video_at_the_same_time_share_its_index(tmp_path):
    path = tmp_path / "one.mp4"
    path.write_bytes(Path(video()).read_bytes())
    decoded(read_clip(path, 2))
    with VIDEOS.opened(str(path)) as one, VIDEOS.opened(str(path)) as other:
        assert one is not other
        assert one.index is other.index


def test_several_clips_of_a_video_and_another_camera():
    left, right = path_of("h264"), path_of("turned left")
    sample = {"views": [read_clip(left, 2, start=start) for start in (3, 9)], "right": read_clip(right, [7])}
    data = DataLoader([sample, sample], batch_size=2, collate_fn=collate_encoded)
    (batch,) = StreamedLoader(data, [DecodeStage()], device="cpu")
    for view, start in zip(batch["views"], (3, 9), strict=True):
        assert view.shape == (2, 2, 3, 48, 64)
        assert np.array_equal(view[1].permute(0, 2, 3, 1).numpy(), frames(left)[start : start + 2])
    assert np.array_equal(batch["right"][0, 0].permute(1, 2, 0).numpy(), frames(right)[7])


def test_clips_of_several_sizes_are_drawn_for_once_each():
    still = [(read_clip(path_of(case), [7] * 3), index) for index, case in enumerate(("h264", "turned left") * 4)]
    augment = gpuaug.fuse([K.RandomResizedCrop((12, 12)), K.ColorJiggle(0.5, 0.5)], ragged=True)
    (batch,) = StreamedLoader([collate_encoded(still)], [DecodeStage(), augment], device="cpu", seed=3)
    frames_of_clips = batch[0].reshape(8, 3, 3, 12, 12)
    assert torch.equal(frames_of_clips, frames_of_clips[:, :1].expand(-1, 3, -1, -1, -1))
    assert not torch.equal(frames_of_clips[0], frames_of_clips[2]), "each clip has a draw of its own"


HELD_AS = {
    "arrays": lambda clip: clip,
    "tensors": lambda clip: torch.from_numpy(clip).permute(0, 3, 1, 2),
    "Video": lambda clip: tv_tensors.Video(torch.from_numpy(clip).permute(0, 3, 1, 2).contiguous()),
}


@pytest.mark.parametrize("form", HELD_AS)
def test_clips_that_a_dataset_decodes_are_collated_as_clips_of_files(form):
    chosen = [(path_of(case), start) for start in (3, 9) for case in ("h264", "turned left")]
    files = [(read_clip(path, 3, start=start), start) for path, start in chosen]
    held = [(HELD_AS[form](np.ascontiguousarray(frames(path)[start : start + 3])), start) for path, start in chosen]
    collated, _ = gpuaug.collate_ragged(held)
    from_files = DecodeStage()(collate_encoded(files)[0], "cpu")
    assert collated.shapes.frames == from_files.shapes.frames == 3
    assert np.array_equal(collated.shapes.sizes, from_files.shapes.sizes)
    assert all(torch.equal(*pair) for pair in zip(collated, from_files, strict=True))


def test_frames_that_nothing_needs_are_not_packed():
    path = path_of("h264")  # of 40 frames, with key frames 0, 12, 22 and 34
    keys, dropped = [0, 12, 22, 34], 0
    for numbers in ([0, 39], [13, 39], [*range(0, 40, 4)]):
        clips = collate_encoded([(read_clip(path, numbers), 0)])[0]
        groups = {max(key for key in keys if key <= number) for number in numbers}
        assert np.count_nonzero(clips.headers.packets["key"]) == len(groups)
        assert np.array_equal(decoded(read_clip(path, numbers))[0], frames(path)[numbers])
        dropped = 40 - len(clips.headers.packets)
    assert dropped > 5, "B-frames that are neither shown nor referred to"


FAST_START = (("movflags", "faststart"),)

BAD = {
    "a missing file": lambda: "missing.mp4",
    "no video": lambda: io.BytesIO(b"no video at all").getvalue(),
    "an empty file": lambda: b"",
    "a file that ends early": lambda: cut(video(name="front.mp4", container=FAST_START), 0.6),
    "a file without its end": lambda: cut(video(), 0.6),
    "a codec without a decoder": lambda: Path(path_of("Matroska")).read_bytes().replace(b"V_MPEG4/ISO/AVC", b"V_MPEG4/ISO/XYZ"),
}


def cut(path, part):
    with open(path, "rb") as file:
        data = file.read()
    return data[: int(len(data) * part)]


@pytest.mark.parametrize("case", BAD)
def test_a_bad_video_is_an_error_at_its_batch_or_its_sample_is_replaced(case):
    good, bad = read_clip(video(), 2, start=3), read_clip(BAD[case](), 2, at=1)
    streamed = iter(loader([good, good, good, bad]))
    next(streamed)
    with pytest.raises(DecodeError, match="because of sample 1"):
        next(streamed)
    replacing = loader([good, good, good, bad], on_error="replace")
    batches = list(replacing)
    assert batches[1][1].tolist() == [2, 2]
    assert torch.equal(batches[1][0][1], batches[0][0][0])
    assert replacing.stats().replaced == 1


def test_all_clips_of_a_file_that_ends_early_are_an_error_if_they_are_chosen_by_its_length():
    data = BAD["a file that ends early"]()
    for chosen in ({"at": 0.2}, {"start": 3, "short": "loop"}):
        with pytest.raises(DecodeError, match=r"its data end after \d+ of 40 frames"):
            decoded(read_clip(data, 2, **chosen))
    assert np.array_equal(decoded(read_clip(data, 2, start=3))[0], frames(video(name="front.mp4", container=FAST_START))[3:5])


def marked_by_pyav(data):
    """Time stamps of the frames of a video that FFmpeg marks as damaged; none if it decodes no further."""
    with av.open(io.BytesIO(data)) as file, suppress(av.error.InvalidDataError):
        file.streams.video[0].codec_context.thread_count = 1
        return [frame.pts for frame in file.decode(video=0) if frame.is_corrupt]
    return []


def test_a_damaged_frame_is_an_error_of_all_clips_with_frames_that_may_refer_to_it():
    path = video()
    with av.open(path) as file:
        packets = [packet for packet in file.demux(video=0) if packet.size]
    numbers = {packet.pts: number for number, packet in enumerate(sorted(packets, key=lambda packet: packet.pts))}
    for position, packet in enumerate(packets):
        group = itertools.takewhile(lambda later: not later.is_keyframe, packets[position:])
        damaged, *later = [numbers[each.pts] for each in group] or [0]
        data = bytearray(Path(path).read_bytes())
        for at in range(packet.pos + 20, packet.pos + packet.size - 4, 3):
            data[at] ^= 0x5A
        if len(later) > 4 and later[0] < damaged and packet.pts in marked_by_pyav(data):
            break  # before it came damage that FFmpeg does not see, and that decodes to other pixels
    for chosen in (40, [damaged], *([number] for number in later)):
        with pytest.raises(DecodeError, match=f"sample 0: its frame at time stamp {packet.pts} is damaged"):
            decoded(read_clip(data, chosen))
    good = sorted({*range(40)} - {damaged, *later})
    assert np.array_equal(decoded(read_clip(data, good))[0], frames(path)[good])


@cache
def damaged(case, seed):
    """Bytes of a video in which some packets have a bit flipped, zeros at the end, or other bytes at the end."""
    path, rng = path_of(case), random.Random(seed)
    data = bytearray(Path(path).read_bytes())
    with av.open(path) as file:
        packets = rng.sample([packet for packet in file.demux(video=0) if packet.size], 5)
    for packet in packets:
        start, end = packet.pos + rng.randrange(packet.size), packet.pos + packet.size
        match seed % 3:
            case 0:
                data[start] ^= 1 << rng.randrange(8)
            case 1:
                data[start:end] = bytes(end - start)
            case 2:
                data[start:end] = rng.randbytes(end - start)
    return bytes(data)


def test_a_damaged_clip_decodes_alike_alone_and_beside_others_whatever_memory_held():
    chosen = [0, 9, 17, 25, 38]
    clips = [read_clip(damaged(case, seed), chosen) for seed in range(3) for case in ("h264", "hevc", "vp9")]
    alone = []
    for clip in clips:
        try:
            alone.append(decoded(clip, threads=1)[0])
        except DecodeError:
            alone.append(None)
    bad = [index for index, made in enumerate(alone) if made is None]
    assert 2 < len(bad) < len(clips) - 2
    sources = source_indices(len(clips), bad)
    for threads, byte in ((1, 0x5A), (2, 0xFF), (8, 0x01)):
        with memory_that_held(byte):
            beside = decoded(*clips, threads=threads, on_error="replace")
        for index, made in zip(sources, beside, strict=True):
            assert np.array_equal(made, alone[index]), (index, threads)


def test_the_decoders_of_clips_are_shown():
    table = DecodeStage(backend="cpu").decoders
    assert table["nvdec"].words == "backend='cpu'"
    assert "pyav     PyAV" in str(table)


@pytest.mark.parametrize("packet", [b"\0\0\0\5ab", b"\0\0\0\2ab\0", b"\0\0\0\2ab\0\0\0\1"], ids=["unit", "length", "last unit"])
def test_a_packet_that_is_cut_off_is_damaged(packet):
    assert nal.with_start_codes(memoryview(b"\0\0\0\2ab"), 4) == b"\0\0\0\1ab"
    with pytest.raises(limits.VideoError, match="a packet is damaged"):
        nal.with_start_codes(memoryview(packet), 4)
