"""Key of a feature cache: rows are read if, and only if, they would be computed again in the same way."""

import copy
import functools
import importlib
import itertools
import json
import logging
import pickle
import random
import re
import sys
import types
import warnings
from pathlib import Path

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support.cache.cached_loaders import Files, as_dict, encoder, loader, rows_of, stages, write_images
from support.process import processes
from torch import nn
from torch.distributions import Normal
from torch.utils.data import ChainDataset, ConcatDataset, Dataset, IterableDataset

import gpuaug
from gpuaug import FeatureCache

SETTINGS = types.ModuleType("settings_of_the_test")
LOG = logging.getLogger(__name__)
SCALE = np.ones(1)


def key_of(folder, *, extra=None, **options):
    """Return the key of a cache after one batch."""
    folder.mkdir(exist_ok=True)
    cache = FeatureCache(folder / "cache")
    made = stages(cache, **options)
    if extra is not None:
        made.insert(2, gpuaug.TransformStage(extra, on="image", name="extra"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The feature cache in")
        list(loader(cache.wrap(Files(write_images(folder / "images", 1), as_dict)), made, shuffle=False, generator=None))
    return cache.key


def closed_over(value):
    return lambda images: images * (value[0] if isinstance(value, list) else value)


class Scale:
    """Callable object whose attribute is not named like the parameter of its constructor."""

    def __init__(self, factor):
        self.by = factor

    def __call__(self, images):
        return images * self.by

    def scaled(self, images):
        return self(images)


class Settings(dict):
    """Dict whose items are attributes. An attribute that is absent is a ``KeyError``, as in many libraries of settings."""

    __getattr__ = dict.__getitem__


class SlottedScale:
    __slots__ = ("by",)

    def __init__(self, factor):
        self.by = factor

    def __call__(self, images):
        return images * self.by


class WithStateSetter(SlottedScale):
    """Object whose ``__reduce_ex__`` returns six elements. The last element is a function, which sets the state."""

    def __reduce_ex__(self, protocol):
        return type(self), (1,), {"by": self.by}, None, None, setattr


class Within(Scale):
    """Objects that refer to each other, in a chain that is longer than Python's limit of recursion."""

    def __init__(self, factor):
        super().__init__(1)
        self.next = Scale(factor)
        for _ in range(2000):
            self.next = types.SimpleNamespace(next=self.next, first=self)


def with_class_attribute(value):
    return type("Scaled", (Scale,), {"offset": value, "__call__": lambda self, images: images + self.offset})(1)


class Layers(nn.Module):
    def __init__(self, layers, last):
        super().__init__()
        self.layers, self.used = layers, last

    def forward(self, images):
        for layer in self.layers[: self.used]:
            images = layer(images)
        return images


class Buffered(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("offset", torch.full((3, 1, 1), float(value)), persistent=False)

    def forward(self, images):
        return images + self.offset


def weighted(value, kind=nn.Conv2d):
    module = kind(3, 3, 1)
    nn.init.constant_(module.weight, value)
    nn.init.zeros_(module.bias)
    return module.requires_grad_(False)


def hooked(value):
    module = encoder()
    module.register_forward_hook(lambda module, inputs, result: result * value)
    return module


def reads_array(images):
    return images * float(SCALE[0])


def global_array(value):
    SCALE[:] = value
    return reads_array


def reads_module(images):
    LOG.debug("images of a batch")
    return SETTINGS.nested.scaled(images)


def module_attribute(value):
    SETTINGS.nested = types.ModuleType("nested")
    SETTINGS.nested.scaled = (None, lambda images: images * 1, lambda images: images * 2)[value]
    SETTINGS.nested.unused = random.random()
    return reads_module


def helper(images):
    return images


def calls_helper(images):
    def nested(values):
        return helper(values)

    return nested(images)


def helper_function(value):
    globals()["helper"] = (None, lambda images: images * 1, lambda images: images * 2)[value]
    return calls_helper


def decorated(value):
    def decorator(function):
        @functools.wraps(function)
        def scaled(images):
            return function(images) * value

        return scaled

    return decorator(Scale(1).scaled)


def cached(value):
    scale = functools.lru_cache((lambda: 1) if value == 1 else (lambda: 2))
    return lambda images: images * scale()


def with_default(value):
    def scaled(images, by=value):
        return images * by

    return scaled


def with_keyword_default(value):
    def scaled(images, *, by=value):
        return images * by

    return scaled


def nested_function(value):
    def first(images):
        def scaled(inner):
            return inner * 1

        return scaled(images)

    def second(images):
        def scaled(inner):
            return inner * 2

        return scaled(images)

    return first if value == 1 else second


def recursive(value):
    def scaled(images, times=1):
        return scaled(images, times - 1) * value if times else images

    return scaled


def drawn(value):
    normal = Normal(0.0, float(value))
    return lambda images: images + normal.sample()


def table(make):
    """Return an encoder with a tensor of another layout, which its result does not depend on."""
    module = encoder()
    module.table = make(torch.eye(3))
    return module


DEPENDENCIES = {
    "closure: number": lambda value: {"extra": closed_over(value)},
    "closure: tensor": lambda value: {"extra": closed_over(torch.tensor(float(value)))},
    "closure: list": lambda value: {"extra": closed_over([value])},
    "closure: array": lambda value: {"extra": closed_over(np.float32(value))},
    "closure: read-only dict": lambda value: {"extra": closed_over([1, types.MappingProxyType({"by": value})])},
    "closure: buffer": lambda value: {"extra": closed_over([1, memoryview(bytes([value]))])},
    "closure: pattern": lambda value: {"extra": closed_over([1, re.compile(f"{value}")])},
    "closure: distribution": lambda value: {"extra": drawn(value)},
    "closure: itself": lambda value: {"extra": recursive(value)},
    "attribute": lambda value: {"extra": Scale(value)},
    "attribute: tensor": lambda value: {"extra": Scale(torch.tensor(float(value)))},
    "attributes that are items": lambda value: {"extra": closed_over([1, Settings(by=value)])},
    "attribute without a dict": lambda value: {"extra": SlottedScale(value)},
    "state with a function": lambda value: {"extra": WithStateSetter(value)},
    "attribute of an attribute": lambda value: {"extra": Within(value)},
    "class attribute": lambda value: {"extra": with_class_attribute(value)},
    "class": lambda value: {"extra": (Scale if value == 1 else SlottedScale)(1)},
    "bound method": lambda value: {"extra": Scale(value).scaled},
    "partial": lambda value: {"extra": functools.partial(torch.mul, other=value)},
    "partial: set": lambda value: {"extra": functools.partial(lambda images, names: images, names={"a", "b", str(value)})},
    "partial: mapping": lambda value: {"extra": functools.partial(lambda images, names: images, names={"a": [value]})},
    "default": lambda value: {"extra": with_default(value)},
    "default of a keyword": lambda value: {"extra": with_keyword_default(value)},
    "nested function": lambda value: {"extra": nested_function(value)},
    "decorator": lambda value: {"extra": decorated(value)},
    "decorated function": lambda value: {"extra": torch.no_grad()(closed_over(value))},
    "cached function": lambda value: {"extra": cached(value)},
    "global array": lambda value: {"extra": global_array(value)},
    "helper function": lambda value: {"extra": helper_function(value)},
    "attribute of a module": lambda value: {"extra": module_attribute(value)},
    "weights of a transform": lambda value: {"extra": weighted(value)},
    "buffer of a transform": lambda value: {"extra": Buffered(value)},
    "module of Kornia": lambda value: {"extra": K.RandomHorizontalFlip(p=value / 4)},
    "fused pipeline": lambda value: {
        "transform": gpuaug.fuse(K.AugmentationSequential(K.CenterCrop(16), K.RandomHorizontalFlip(p=value / 4)), ragged=True)
    },
    "module of the user in a fused pipeline": lambda value: {
        "transform": gpuaug.fuse(K.AugmentationSequential(K.CenterCrop(16), Buffered(value)), ragged=True)
    },
    "weights": lambda value: {"module": encoder(value)},
    "weights, quantized": lambda value: {
        "module": table(lambda eye: torch.quantize_per_tensor(eye, value, 0, torch.quint8)),
    },
    "weights, sparse": lambda value: {"module": table(lambda eye: (value * eye).to_sparse())},
    "weights, nested": lambda value: {"module": table(lambda eye: torch.nested.nested_tensor([value * eye]))},
    "weights, conjugate": lambda value: {"module": table(lambda eye: (eye + value * 1j).conj())},
    "number of an encoder": lambda value: {"module": Layers(encoder(), value)},
    "hook": lambda value: {"module": hooked(value)},
    "output": lambda value: {"output": closed_over(torch.tensor(value))},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", DEPENDENCIES)
def test_a_value_that_rows_depend_on_is_part_of_the_key(name, tmp_path):
    make = DEPENDENCIES[name]
    assert key_of(tmp_path, **make(1)) != key_of(tmp_path, **make(2))


def all_keys(folder):
    warnings.simplefilter("ignore")
    return {name: key_of(Path(folder), **make(1)) for name, make in DEPENDENCIES.items()}


ANOTHER_PROCESS = """
import json, sys
sys.path.insert(0, {folder!r})
import test_key as another_name
from gpuaug.decode.decoders import loops
loops.png_and_webp_loop = lambda: None  # its compilation takes seconds
print(hash("a string"))
print(json.dumps(another_name.all_keys({images!r})))
"""


@pytest.mark.filterwarnings("ignore")
def test_keys_are_the_same_in_another_process(tmp_path):
    script = ANOTHER_PROCESS.format(folder=str(Path(__file__).parent), images=str(tmp_path / "other"))
    hashed, keys = processes.run_script(script).stdout.splitlines()
    assert int(hashed) != hash("a string"), "the order of sets is another there"
    assert json.loads(keys) == all_keys(tmp_path)


class Changed:
    """Callable object with values that change in a run, and that rows do not depend on."""

    def __init__(self):
        self.generator = random.Random(0)
        self.numpy_generator = np.random.default_rng(0)
        self.device = torch.device("cpu")
        self.log = logging.getLogger("gpuaug")
        self.augment = K.RandomHorizontalFlip()

    def __call__(self, images):
        return self.augment(images)

    def change(self):
        self.generator.random()
        self.numpy_generator.random()
        self.device = torch.device("meta")
        self.log = LOG
        self.augment(torch.rand(2, 3, 8, 8))
        self.augment.to(torch.float64)


def test_what_rows_do_not_depend_on_is_no_part_of_the_key(tmp_path):
    changed, module = Changed(), encoder()
    before = key_of(tmp_path, extra=changed, module=module)
    changed.change()
    module.train()
    assert key_of(tmp_path, extra=changed, module=module, capture="never", graph_bytes=1) == before


def test_code_is_compared_as_python_has_loaded_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "edited_by_the_test.py"

    def write(text):
        path.write_text(text)
        importlib.invalidate_caches()

    write("def scaled(images):\n    return images * 1\n")
    module = importlib.import_module("edited_by_the_test")
    first = key_of(tmp_path, extra=module.scaled)
    write("def scaled(images):\n    return images * 2\n")
    assert key_of(tmp_path, extra=module.scaled) == first
    assert key_of(tmp_path, extra=importlib.reload(module).scaled) != first
    write("# A comment.\n\n\ndef scaled(images):\n    return images * 1  # another one\n")
    assert key_of(tmp_path, extra=importlib.reload(module).scaled) == first


def test_a_warning_names_the_value_that_differs(tmp_path):
    paths = write_images(tmp_path / "images", 1)
    cache = FeatureCache(tmp_path / "cache")

    def run(value):
        made = stages(cache)
        made.insert(2, gpuaug.TransformStage(Scale(value), on="image", name="scale"))
        rows_of(loader(cache.wrap(Files(paths, as_dict)), made))

    run(1)
    with pytest.warns(gpuaug.GpuAugWarning, match=r"other scale\.transform\.by\. Delete"):
        run(2)


class Native(Scale):
    """Object of which Python cannot read anything, like those of some extension modules."""

    __slots__ = ()

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot pickle")

    @property
    def __dict__(self):
        raise AttributeError("no attributes")


def test_values_that_cannot_be_read_are_named(tmp_path):
    with pytest.warns(gpuaug.GpuAugWarning, match="A change of Native is not noticed by the feature cache"):
        key_of(tmp_path, extra=functools.partial(lambda images, native: images, native=Native(1)))


@pytest.mark.parametrize("content", [b"", b"\xff", b"[1]", b"{"])
def test_a_damaged_description_of_a_key_is_written_anew(content, tmp_path):
    key = key_of(tmp_path)
    (path,) = tmp_path.glob("cache/*/key.json")
    whole = path.read_bytes()
    path.write_bytes(content)
    cache = FeatureCache(tmp_path / "cache")
    assert key in str(cache)
    with pytest.warns(gpuaug.GpuAugWarning, match=r"which are not known, because key\.json is damaged"):
        list(loader(cache.wrap(Files(write_images(tmp_path / "images", 1), as_dict)), stages(cache), seed=8))
    assert key_of(tmp_path) == key
    assert path.read_bytes() == whole


class Inner(Dataset):
    """Data set that refers to another one by an attribute with a name of its own."""

    def __init__(self, of):
        self.of = of

    def __len__(self):
        return len(self.of)

    def __getitem__(self, index):
        return self.of[index]


class Parts(Inner):
    """Data set that has another one in a dict."""

    def __init__(self, of):
        self.parts = {"all": of}

    @property
    def of(self):
        return self.parts["all"]


class Stream(IterableDataset):
    def __init__(self, paths):
        self.paths = paths

    def __iter__(self):
        return itertools.starmap(as_dict, zip(self.paths, itertools.count(), strict=False))


COUNT = 70
PLACES = {
    "many data sets": lambda cache, paths: ConcatDataset([cache.wrap(Files([path], as_dict)) for path in paths]),
    "attribute": lambda cache, paths: Inner(Inner(cache.wrap(Files(paths, as_dict)))),
    "mapping": lambda cache, paths: Parts(cache.wrap(Files(paths, as_dict))),
    "without a length": lambda cache, paths: cache.wrap(ChainDataset([Stream(paths)])),
}


@pytest.mark.parametrize("place", PLACES)
def test_wrapped_data_sets_are_found(place, tmp_path):
    paths = write_images(tmp_path / "images", COUNT)
    cache = FeatureCache(tmp_path / "cache")
    streamed = loader(PLACES[place](cache, paths), stages(cache), batch=16, shuffle=False, generator=None)
    for _ in range(2):
        assert len(list(streamed)) == -(-COUNT // 16)
    assert (streamed.stats().rows_encoded, streamed.stats().rows_read) == (COUNT, COUNT)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["deepcopy", "pickle"])
def test_workers_of_a_copied_data_set_read_rows(copied, tmp_path):
    paths = write_images(tmp_path / "images", 8)
    cache = FeatureCache(tmp_path / "cache", views=2)
    dataset = copied(cache.wrap(Files(paths, as_dict)))
    options = {"num_workers": 1, "persistent_workers": True}
    with loader(dataset, stages(cache), **options) as streamed:
        read = [rows_of(streamed) for _ in range(4)]
        assert streamed.stats().rows_read == 16
    for epoch in (2, 3):
        assert all(torch.equal(read[epoch][label], row) for label, row in read[epoch - 2].items())
