"""Clips that NVDEC decodes: its sessions and their errors by a double on the CPU, pixels on a card."""

import numpy as np
import pytest
import torch
from support.video import nvdec_double
from support.video.videos import frames, video
from torch.utils.data import DataLoader

from gpuaug import DecodeError, DecodeStage, DeviceError, GpuAugWarning, StreamedLoader, collate_encoded, read_clip
from gpuaug.core.streams import Lane
from gpuaug.decode.clips import layout
from gpuaug.decode.clips.layout import convert
from gpuaug.decode.decoders import nvdec, registry
from gpuaug.decode.decoders.nvdec import NvDec, SessionKey, SessionPool

from .test_clips import BY_CPU, CASES, MOST_APART, apart, clips_of, path_of


def decoded(*clips, device="cpu", **options):
    made = DecodeStage(**options)(collate_encoded([(clip, 0) for clip in clips])[0], device)
    return made.permute(0, 1, 3, 4, 2).cpu().numpy()


def test_frames_beside_one_another_are_fed_together_and_come_in_their_order(monkeypatch):
    nvdec_double.use(monkeypatch)
    path = path_of("h264")
    numbers = [31, 2, 2, 17, 39, 0]
    assert apart(decoded(read_clip(path, numbers))[0], frames(path)[numbers]) <= MOST_APART


def test_clips_of_one_batch_go_to_the_decoder_that_their_headers_name(monkeypatch):
    decoder = nvdec_double.use(monkeypatch)
    monkeypatch.setattr(layout, "MAX_CONVERTED_PIXELS", 3 * 48 * 64)
    cases = ["h264", "10 bits", "hevc", "BT.709", "BT.709 in full range", "lossless", "h264"]
    made = decoded(*(read_clip(path_of(case), 2, start=3) for case in cases))
    for case, clip in zip(cases, made, strict=True):
        assert apart(clip, frames(path_of(case))[3:5]) <= (0 if case in BY_CPU else MOST_APART)
    assert 3 <= len(decoder.sessions) <= 5


def test_clips_of_an_open_group_of_pictures_go_to_the_cpu(monkeypatch):
    decoder = nvdec_double.use(monkeypatch)
    path = path_of("an open group of pictures")
    clips = collate_encoded([(read_clip(path, 2, start=start), 0) for start in (0, 25)])[0]
    assert decoder.takes(clips.headers.table).tolist() == [True, False]


def test_sessions_stay_open_for_other_files_and_later_loaders(monkeypatch):
    nvdec_double.use(monkeypatch)
    first, second = video(), video(name="second.mp4", seed=1)
    before = nvdec_double.Decoder.made
    for path in (first, second, first, second):
        assert apart(decoded(read_clip(path, 4))[0], frames(path)[:4]) <= MOST_APART
    assert nvdec_double.Decoder.made - before <= nvdec.SESSIONS_PER_LANE * 8
    one = Lane("decode/one")
    opened = []
    pool = SessionPool(lambda key, stream: opened.append(key) or object(), max_sessions=2)
    keys = [SessionKey("h264", 48, width) for width in (64, 80, 96)]
    for number in (0, 1, 0, 2, 0, 1):
        pool.put(keys[number], one, pool.take(keys[number], one))
    assert [key.width for key in opened] == [64, 80, 96, 80], "the least recently used one is closed"
    assert len(pool) == 2
    other = Lane("decode/other")
    pool.put(keys[0], other, pool.take(keys[0], other))
    assert len(opened) == 5, "a session is one lane's"


def raising(frames, ended):
    raise RuntimeError("HandleVideoSequence : \nError code : 801")


CHANGES = {
    "a frame less": (lambda frames, ended: frames[ended:], r"NVDEC returns \d+ frames from its \d+ packets"),
    "a frame more": (
        lambda frames, ended: frames + frames[:ended],
        r"NVDEC returns more than \d+ frames, which is its number of packets",
    ),
    "an error": (raising, "NVDEC says: HandleVideoSequence :"),
    "another size": (
        lambda frames, ended: [smaller(frame) for frame in frames],
        r"NVDEC returns frames of shape \(70, 64\), but its header says \(72, 64\)",
    ),
}


def smaller(frame):
    frame.pixels = frame.pixels[2:]
    return frame


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_wrong_with_a_clip_is_an_error_at_its_batch_and_ends_the_session(monkeypatch, case):
    change, message = CHANGES[case]
    wrong = [True]
    decoder = nvdec_double.use(monkeypatch, change=lambda frames, ended: change(frames, ended) if wrong[0] else frames)
    path = video()
    with pytest.raises(DecodeError, match=f"sample 0 .*: {message}"):
        decoded(read_clip(path, 5))
    assert len(decoder.sessions) == 0
    wrong[0] = False
    assert apart(decoded(read_clip(path, 5))[0], frames(path)[:5]) <= MOST_APART


@pytest.mark.parametrize("full_range", [False, True])
@pytest.mark.parametrize(
    ("matrix", "weights"), [(1, (0.2126, 0.0722)), (2, (0.299, 0.114)), (6, (0.299, 0.114)), (9, (0.2627, 0.0593))]
)
def test_the_conversion_is_the_exact_one(matrix, weights, full_range):
    rng = np.random.default_rng(0)
    nv12 = torch.from_numpy(rng.integers(0, 256, (2, 12, 6), np.uint8))
    rgb = torch.zeros(2, 8, 6, 3, dtype=torch.uint8)
    convert(nv12, rgb, matrix, full_range=full_range)
    red, blue = weights
    luma = nv12[:, :8].numpy().astype(float)
    chroma = nv12[:, 8:].numpy().reshape(2, 4, 3, 2).repeat(2, 1).repeat(2, 2) - 128.0
    luma, chroma = (luma, chroma) if full_range else ((luma - 16) * 255 / 219, chroma * 255 / 224)
    r, b = luma + 2 * (1 - red) * chroma[..., 1], luma + 2 * (1 - blue) * chroma[..., 0]
    g = (luma - red * r - blue * b) / (1 - red - blue)
    assert apart(rgb.numpy(), np.stack([r, g, b], -1).round().clip(0, 255)) <= 1
    turned = torch.zeros(2, 6, 8, 3, dtype=torch.uint8)
    convert(nv12, turned, matrix, 8, full_range=full_range)
    assert torch.equal(turned, rgb.rot90(1, (1, 2)))


def test_a_library_that_is_missing_is_told(monkeypatch):
    monkeypatch.setattr(nvdec, "library", lambda: None)
    cuda = torch.device("cuda", 0)
    with pytest.warns(GpuAugWarning, match="The CPU decodes clips, which may be too slow for a GPU, because the card does not"):
        found = registry.find_clips("auto", cuda)
    assert found["nvdec"].words == "PyNvVideoCodec is not installed"
    with pytest.raises(DeviceError, match=r"got 'nvdec': PyNvVideoCodec is not installed\. Leave it out\."):
        registry.find_clips("nvdec", cuda)

    def failing():
        raise RuntimeError("libnvcuvid.so.1: cannot open\n=== TROUBLESHOOTING")

    monkeypatch.setattr(nvdec, "library", failing)
    with pytest.warns(GpuAugWarning, match=r"cannot be set up \(libnvcuvid.so.1: cannot open\). In a container, add video"):
        registry.find_clips("auto", cuda)


@pytest.mark.parametrize(
    ("message", "reason"), [("CUDA error: out of memory", "CUDA error: out of memory"), ("", "RuntimeError")]
)
def test_a_card_without_memory_is_told_before_the_library_is_called(monkeypatch, message, reason):
    def full(device):
        raise RuntimeError(message)

    monkeypatch.setattr(nvdec, "library", object)
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    with pytest.warns(GpuAugWarning, match=rf"cannot be set up \({reason}\)"):
        registry.find_clips("auto", torch.device("cuda", 0))


ON_CARD = ["h264", "hevc", "vp9", "an open group of pictures", "BT.709", "BT.601 in full range", "turned left", "10 bits"]


def large(case):
    """Videos that are large enough for the engines."""
    options = {"name": f"{case}.mp4", **CASES[case]}
    return video(**{**options, "name": f"large-{options['name']}", "height": 160, "width": 240})


@pytest.mark.gpu
def test_clips_on_a_card_are_those_of_pyav():
    pytest.importorskip("PyNvVideoCodec")
    table = DecodeStage(backend="nvdec").decoders
    assert isinstance(table["nvdec"], NvDec), table
    for case in ON_CARD:
        path = large(case)
        starts, clips = clips_of(path)
        for _ in range(2):
            got = decoded(*clips, device="cuda", backend="nvdec")
            for start, clip in zip(starts, got, strict=True):
                assert apart(clip, frames(path)[start : start + 9 : 4]) <= MOST_APART, (case, start)
    assert len(table["nvdec"].sessions) > 0


@pytest.mark.gpu
def test_a_loader_on_a_card_gives_the_same_clips_at_each_depth_beside_a_model():
    pytest.importorskip("PyNvVideoCodec")
    paths = [large(case) for case in ("h264", "hevc", "vp9", "10 bits")]
    clips = [(read_clip(paths[index % 4], 4, 4, at=index / 39), index) for index in range(40)]
    weight = torch.randn(2048, 2048, device="cuda")

    def epoch(depth, **options):
        data = DataLoader(clips, batch_size=8, num_workers=2, collate_fn=collate_encoded)
        streamed = StreamedLoader(data, [DecodeStage(**options)], device="cuda", depth=depth)
        for made, labels in streamed:
            for _ in range(20):
                torch.mm(weight, weight)
            yield made.clone(), labels.tolist()

    reference = list(epoch(0))
    for depth in (1, 3):
        for (made, labels), (wanted, numbers) in zip(epoch(depth), reference, strict=True):
            assert labels == numbers
            assert torch.equal(made, wanted)
    for (made, _), (wanted, _) in zip(epoch(2, backend="cpu"), reference, strict=True):
        assert (made.int() - wanted.int()).abs().max() <= MOST_APART


@pytest.mark.gpu
def test_a_session_that_fails_on_a_card_is_followed_by_another():
    pytest.importorskip("PyNvVideoCodec")
    path = large("h264")
    clips = collate_encoded([(read_clip(path, 4), 0)])[0]
    first, size = (int(clips.headers.packets[0][name]) for name in ("start", "size"))
    clips.data[first : first + size] = 0
    with pytest.raises(DecodeError, match="NVDEC "):
        DecodeStage(backend="nvdec")(clips, "cuda")
    assert apart(decoded(read_clip(path, 4), device="cuda", backend="nvdec")[0], frames(path)[:4]) <= MOST_APART


@pytest.mark.multigpu
def test_two_cards_decode_at_once():
    pytest.importorskip("PyNvVideoCodec")
    path = large("h264")
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        made = DecodeStage()(collate_encoded([(read_clip(path, 4), 0)])[0], device)
        assert made.device == torch.device(device)
        assert apart(made[0].permute(0, 2, 3, 1).cpu().numpy(), frames(path)[:4]) <= MOST_APART
