"""Samples of any kind and form become a batch, or an error of gpuaug, or of ``default_collate`` with a note that says where."""

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from support.batches.nested_batches import LEAVES, ODD, containers
from support.files.damaged_files import whole_files
from support.public.fuzzing import cases, outcome

import gpuaug

pytestmark = pytest.mark.timeout(1800)

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
MODES = ["RGB", "L", "RGBA", "P", "CMYK", "I;16", "F", "1", "LA", "I"]
ARRAYS = st.builds(np.zeros, SHAPES, st.sampled_from([np.uint8, np.uint8, np.uint16, np.float32, np.bool_]))
TENSORS = st.builds(torch.zeros, SHAPES, dtype=st.sampled_from([torch.uint8, torch.uint8, torch.int16, torch.float32]))
PIL_IMAGES = st.builds(PIL.Image.new, st.sampled_from(MODES), st.tuples(st.integers(0, 5), st.integers(0, 5)))
FILES = st.binary(max_size=5) | st.sampled_from([gpuaug.read_encoded("/nowhere"), {"bytes": None, "path": "/"}, *whole_files()])
IMAGES = ARRAYS | TENSORS | PIL_IMAGES | FILES
SAMPLES = st.recursive(IMAGES | LEAVES | ODD, containers, max_leaves=4)


@cases(50)
@given(
    st.lists(SAMPLES, max_size=3) | SAMPLES.map(lambda sample: [sample] * 2) | st.lists(st.tuples(IMAGES, SAMPLES), max_size=3),
    st.fixed_dictionaries({"convert": st.booleans(), "channels": st.sampled_from([1, 3, None])}),
)
@pytest.mark.filterwarnings("ignore")  # of PIL
def test_any_samples_are_collated_or_refused(samples, options):
    for made in (outcome(gpuaug.collate_ragged, samples, **options), outcome(gpuaug.collate_encoded, samples)):
        event(type(made).__name__)
