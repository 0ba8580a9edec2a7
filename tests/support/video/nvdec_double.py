"""A double of PyNvVideoCodec on the CPU: sessions that decode by PyAV, and use the memory of their frames again."""

import ctypes
from types import SimpleNamespace

import av
import torch

from gpuaug.decode.decoders import nvdec, registry
from gpuaug.decode.decoders.nvdec import NvDec

SUPPORTED = {
    "supported": 1,
    "num_decoder_engines": 7,
    "height_min": 16,
    "width_min": 48,
    "height_max": 4096,
    "width_max": 4096,
    "mb_num_max": 65536,
}
CODECS = {"H264": "h264", "HEVC": "hevc", "VP9": "vp9"}
"""As an H100, it has no engine for AV1."""


class PacketData:
    """A packet by its address."""

    bsl_data = bsl = pts = 0


class Frame:
    """A decoded frame, as NV12."""

    def __init__(self, frame):
        planes = torch.from_numpy(frame.reformat(format="nv12").to_ndarray())
        self.pixels = planes.clone()

    def __dlpack__(self, **options):
        return self.pixels.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.pixels.__dlpack_device__()


class Decoder:
    """A session."""

    made = 0

    def __init__(self, codec, change):
        type(self).made += 1
        self._codec, self._change, self._frames = codec, change, []
        self._begin()

    def _begin(self):
        self._context = av.CodecContext.create(self._codec, "r")
        self._context.thread_count = 1

    def Decode(self, packet):
        for frame in self._frames:
            frame.pixels.fill_(77)
        data = ctypes.string_at(packet.bsl_data, packet.bsl) if packet.bsl else None
        packets = [av.Packet(data)] if self._codec == "vp9" and data else self._context.parse(data)
        found = [frame for each in packets for frame in self._context.decode(each)]
        if data is None:
            found += self._context.decode(None)
            self._begin()
        self._frames = self._change([Frame(frame) for frame in found], data is None)
        return list(self._frames)


def library(change=lambda frames, _ended: frames):
    """The module. ``change`` is given the frames of each call, and whether it is the last, and returns others."""
    names = {name: name for name in (*CODECS, "AV1")}
    return SimpleNamespace(
        __version__="2.2.4",
        PacketData=PacketData,
        cudaVideoCodec=SimpleNamespace(**names),
        cudaVideoChromaFormat=SimpleNamespace(**{"420": 1}),
        OutputColorType=SimpleNamespace(NATIVE=0),
        GetDecoderCaps=lambda codec, **_: SUPPORTED if codec in CODECS else {**SUPPORTED, "supported": 0},
        CreateDecoder=lambda codec, **_: Decoder(CODECS[codec], change),
    )


def use(monkeypatch, **options):
    """Have the double decode clips on the CPU. Returns its decoder."""
    module = library(**options)
    monkeypatch.setattr(nvdec, "library", lambda: module)
    decoder = NvDec(torch.device("cpu"))
    find = registry._find_on_card
    monkeypatch.setattr(registry, "_find_on_card", lambda type_, *others: decoder if type_ is NvDec else find(type_, *others))
    return decoder
