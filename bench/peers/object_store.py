"""Store of the files of a folder that answers as S3 does: for tests and benchmarks without a network.

    python -m bench.peers.object_store FOLDER --processes 4

A bucket is a subfolder, a key is a path in it. The store is read-only: objects are listed (ListObjectsV2) and read, in whole or
by a range of bytes. Credentials are not checked. Requests of paths (bucket/key) that ``--stalled`` matches are never answered.
"""

import asyncio
import os
import re
import socket
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_TYPES = {True: "application/xml", False: "application/octet-stream"}


class ObjectStore:
    """The store in processes of its own, while the context is entered.

    Args:
        folder: Folder of the buckets.
        processes: Number of processes that answer.
        stalled: Regular expression of paths (bucket/key) that are never answered.
    """

    def __init__(self, folder: str | Path, processes: int = 1, stalled: str = "$^") -> None:
        command = [sys.executable, __file__, str(folder), "--processes", str(processes), "--stalled", stalled]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._server.stdout.readline())}"
        """Address of the store."""
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        """Environment variables by which the clients of S3 (boto3, s3fs, obstore) find the store."""

    def __enter__(self) -> "ObjectStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of the store, which end with their standard input."""
        self._server.communicate()


class _Connection(asyncio.Protocol):
    """A connection of a client, which may send requests one after another."""

    def __init__(self, folder: Path, stalled: re.Pattern[str]) -> None:
        self._folder = folder
        self._stalled = stalled
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            self._answer(head.decode("latin-1").split("\r\n"))

    def _answer(self, lines: list[str]) -> None:
        method, target, _ = lines[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        url = urlsplit(target)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        path = self._folder / bucket / key
        if self._stalled.search(f"{bucket}/{key}"):
            return
        if method not in ("GET", "HEAD") or ".." in path.parts:
            self._send(method, "405 Method Not Allowed", b"<Error><Code>MethodNotAllowed</Code></Error>")
            self._received = b""  # the body of the request
            self._transport.close()
        elif not key:
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            self._send(method, "200 OK", self._listing(bucket, query.get("prefix", ""), query.get("delimiter", "")))
        elif not path.is_file():
            self._send(method, "404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._send_object(method, path, headers.get("range"))

    def _send_object(self, method: str, path: Path, requested: str | None) -> None:
        content = path.read_bytes()
        size = len(content)
        status = "200 OK"
        further = {
            "ETag": f'"{size:x}"',
            "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if requested is not None:
            first, last = requested.removeprefix("bytes=").split("-")
            start = int(first) if first else max(0, size - int(last))
            stop = min(int(last) + 1, size) if first and last else size
            content = content[start:stop]
            status = "206 Partial Content"
            further["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self._send(method, status, content, further)

    def _send(self, method: str, status: str, content: bytes, further: dict[str, str] | None = None) -> None:
        headers = {"Content-Length": str(len(content)), "Content-Type": _TYPES[further is None], **(further or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._transport.write(f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + (b"" if method == "HEAD" else content))

    def _listing(self, bucket: str, prefix: str, delimiter: str) -> bytes:
        root = self._folder / bucket
        files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
        objects: list[str] = []
        folders: set[str] = set()
        for key, path in files.items():
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            size = path.stat().st_size
            facts = f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;{size:x}&quot;</ETag><Size>{size}</Size>"
            objects.append(f"<Contents><Key>{escape(key)}</Key>{facts}<StorageClass>STANDARD</StorageClass></Contents>")
        objects += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)]
        count = f"<KeyCount>{len(objects)}</KeyCount><MaxKeys>1000000</MaxKeys><IsTruncated>false</IsTruncated>"
        names = f"<Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix>"
        text = f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{names}{count}{"".join(objects)}</ListBucketResult>'
        return ('<?xml version="1.0" encoding="UTF-8"?>' + text).encode()


async def _serve(options: Namespace, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: _Connection(options.folder, options.stalled), sock=listener)
    end = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), end.set)  # readable when the process that started the store closes it, or ends
    await end.wait()


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m bench.peers.object_store", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=1, help="processes that answer (default: %(default)s)")
    parser.add_argument("--stalled", type=re.compile, default="$^", help="expression of paths that are never answered")
    options = parser.parse_args(argv)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
    for _ in range(options.processes - 1):
        if os.fork() == 0:
            break
    asyncio.run(_serve(options, listener))


if __name__ == "__main__":
    main()
