"""The video engines alone: all frames of a video decoded from packets in memory, by several sessions, and not kept.

Their rate is the upper bound of a loader that decodes as many frames on the engines. Source: PyNvVideoCodec 2.2.4.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from bench.harness.optional_rows import MissingError

_PACKETS_PER_CALL = 32


class Engines:
    """Sessions of one device, with a thread each.

    Args:
        path: A video of H.264.
        sessions: Number of sessions.
        gpu: Index of the device.
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
            to_start_codes = av.bitstream.BitStreamFilterContext("h264_mp4toannexb", stream)
            read = [packet if packet.size else None for packet in file.demux(stream)]
            packets = [bytes(filtered) for packet in read for filtered in to_start_codes.filter(packet)]
            height, width = stream.codec_context.height, stream.codec_context.width
        parts = [b"".join(packets[at : at + _PACKETS_PER_CALL]) for at in range(0, len(packets), _PACKETS_PER_CALL)]
        self._parts = [np.frombuffer(part, np.uint8) for part in parts]
        self._packet, self._gpu = nvc.PacketData, gpu
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
        """Utilisation of the engines in percent, by nvidia-smi, once per call of ``decode``."""

    def decode(self) -> int:
        """Decode the video once by each session. Returns the number of frames."""
        words = ["nvidia-smi", f"--id={self._gpu}", "--query-gpu=utilization.decoder", "--format=csv,noheader,nounits"]
        futures = [self._threads.submit(self._whole, session) for session in self._sessions]
        with suppress(OSError, ValueError, subprocess.SubprocessError):  # an older driver does not tell
            self.percents.append(int(subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout))
        return sum(future.result() for future in futures)

    def _whole(self, session: Any) -> int:
        count = 0
        for part in self._parts:
            packet = self._packet()
            packet.bsl_data = part.ctypes.data
            packet.bsl = len(part)
            count += len(session.Decode(packet))
        return count
