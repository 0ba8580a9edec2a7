"""Which files engines get, by every feature of a header, and that they decode them: against the CPU's decoder."""

import numpy as np
import pytest
import torch
from support.files.encoded import by_pil, psnr_db
from support.files.engine_files import engine_files
from support.files.nvjpeg_double import ON_CARD

from gpuaug import DecodeStage, collate_encoded
from gpuaug.decode.decoders import hybrid
from gpuaug.decode.layout import Layout

LEAST_DB = 38.0
"""nvJPEG rounds otherwise than libjpeg-turbo: by up to 3, in images that are one pixel wide by 10. Garbage has 6 to 15 dB."""

NAMES, FILES = list(engine_files()), [file for file, _ in engine_files().values()]


def encoded():
    return collate_encoded(FILES)


def test_the_header_names_the_decoder_of_each_file():
    batch = encoded()
    assert batch.headers.problems == {}
    taken = Layout(batch.headers, DecodeStage().options, ON_CARD).decoders == 0
    wrong = {name: bool(got) for (name, (_, wanted)), got in zip(engine_files().items(), taken, strict=True) if got != wanted}
    assert wrong == {}
    assert min(taken.sum(), (~taken).sum()) > 50


def test_the_cpu_decodes_them_as_pil_does():
    for name, file, image in zip(NAMES, FILES, DecodeStage(backend="cpu")(encoded(), "cpu"), strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), by_pil(file)), name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CPU decodes clips")  # images need no PyNvVideoCodec
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("backend", ["engines", "hybrid"])
def test_decoders_on_the_card_decode_what_they_get(backend, channels):
    batch, options = encoded(), {"channels": channels, "on_error": "replace"}
    table = batch.headers.table
    by_backend = DecodeStage(backend=backend).decoders[backend].takes(table)
    assert by_backend.sum() > 300
    on_card = DecodeStage(backend=backend, **options)(batch, "cuda")
    by_cpu = DecodeStage(backend="cpu", **options)(batch, "cuda")
    wrong = {}
    for index, (got, wanted) in enumerate(zip(on_card, by_cpu, strict=True)):
        whole_chroma = table["sampling"][index] == 5  # or none
        exact = not by_backend[index] or (backend == "engines" and whole_chroma)
        if got.shape != wanted.shape:
            wrong[NAMES[index]] = "refused"
        elif not torch.equal(got, wanted):
            least = psnr_db(got.cpu().numpy(), wanted.cpu().numpy())
            if exact or least < LEAST_DB:
                wrong[NAMES[index]] = f"{least:.1f} dB"
    assert wrong == {}


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [3, 1])
def test_pixels_do_not_depend_on_whether_the_card_reads_the_huffman_codes(channels, monkeypatch):
    decoded = []
    for least_pixels in (1, 2**62):
        monkeypatch.setattr(hybrid, "CARD_HUFFMAN_PIXELS", least_pixels)
        decoded.append(DecodeStage(backend="hybrid", channels=channels, on_error="replace")(encoded(), "cuda"))
    for name, by_card, by_host in zip(NAMES, *decoded, strict=True):
        assert torch.equal(by_card, by_host), name
