"""Devices that tests of decoding run on: parameters of the fixture ``device`` of ``tests/decode``."""

import pytest

ON_CARD = ("engines", "hybrid")
"""Decoders on a card."""

CARD_HUFFMAN = "hybrid, card"
"""The hybrid decoder, where the card reads the Huffman codes of all baseline JPEGs, small ones too."""

_ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in (*ON_CARD, CARD_HUFFMAN)]
by_each_decoder = pytest.mark.parametrize("device", _ON_GPU, indirect=True)
on_each_device = pytest.mark.parametrize("device", ["cpu", "double", *_ON_GPU], indirect=True)
