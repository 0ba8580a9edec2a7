"""Video engines alone: several sessions decode all frames of a video from packets in memory, and drop the frames.

Their rate is an upper bound for loaders that decode on the engines. Source: PyNvVideoCodec 2.2.4.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from bench.harness.optional_rows import MissingError

_PACKETS_PER_CALL = 32


class Engines:
    """Decoding sessions of one device, each with a thread.

    Args:
        path: An H.264 video.
        sessions: Number of sessions.
        gpu: Index of the GPU.
        stack: Ends the threads.

    Raises:
        MissingError: If PyAV or PyNvVideoCodec is not installed.
    """

    def __init__(self, path: str, sessions: int, gpu: int, stack: ExitStack) -> None:
        try:
            import av
            import PyNvVideoCodec as nvc
        except (ImportError, RuntimeError) as error:
            raise MissingError(f"not installed: {error}") from None
        with av.open(path) as file:
            stream = file.streams.video[0]
            bitstream_filter = av.bitstream.BitStreamFilterContext("h264_mp4toannexb", stream)
            demuxed_packets = [packet if packet.size else None for packet in file.demux(stream)]
            packets = [
                bytes(filtered_packet) for packet in demuxed_packets for filtered_packet in bitstream_filter.filter(packet)
            ]
            height, width = stream.codec_context.height, stream.codec_context.width
        chunks = [b"".join(packets[start : start + _PACKETS_PER_CALL]) for start in range(0, len(packets), _PACKETS_PER_CALL)]
        self._chunks = [np.frombuffer(chunk, np.uint8) for chunk in chunks]
        self._packet_type, self._gpu = nvc.PacketData, gpu
        self._sessions = [
            nvc.CreateDecoder(
                gpuid=gpu,
                codec=nvc.cudaVideoCodec.H264,
                usedevicememory=True,
                maxwidth=width,
                maxheight=height,
                outputColorType=nvc.OutputColorType.NATIVE,
            )
            for _ in range(sessions)
        ]
        self._threads = stack.enter_context(ThreadPoolExecutor(sessions))
        self.percents: list[int] = []
        """Utilisation of the engines in percent, read from nvidia-smi once per call of ``decode``."""

    def decode(self) -> int:
        """Decode the video once in each session. Returns the number of decoded frames."""
        command = ["nvidia-smi", f"--id={self._gpu}", "--query-gpu=utilization.decoder", "--format=csv,noheader,nounits"]
        futures = [self._threads.submit(self._decode_video, session) for session in self._sessions]
        with suppress(OSError, ValueError, subprocess.SubprocessError):  # an older driver does not report it
            self.percents.append(int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout))
        return sum(future.result() for future in futures)

    def _decode_video(self, session: Any) -> int:
        count = 0
        for chunk in self._chunks:
            packet = self._packet_type()
            packet.bsl_data = chunk.ctypes.data
            packet.bsl = len(chunk)
            count += len(session.Decode(packet))
        return count
