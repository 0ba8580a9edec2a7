"""Every public parameter refuses, at once and by name, whatever it cannot work with."""

import inspect
import re

import pytest
from support.public.public_parameters import PARAMETERS, VALUES, Reached

import gpuaug
from gpuaug.loader.checkpoint import Progress

CONSTRUCTED = {
    "CopyPaste",
    "DecodeStage",
    "FeatureCache",
    "FeatureStage",
    "FixedSizeCrop",
    "MixUpBoxes",
    "Mosaic",
    "PadIfSmaller",
    "Stage",
    "StreamedLoader",
    "TransformStage",
}
"""Classes that users construct. Objects of the others are returned to them."""
PASSED_ON = {
    "Ragged.pin_memory": "torch checks its arguments",
    "bind": "the loader calls it",
    "make_params": "torchvision calls it",
    "transform": "torchvision calls it",
    "windows_read": "a stage calls it",
}
LONGEST = 600


def parameters():
    """Every public parameter and every property that can be assigned."""
    functions = {"StreamedLoader.load_state_dict": Progress.load_state_dict}
    for name in gpuaug.__all__:
        value = getattr(gpuaug, name)
        if inspect.isfunction(value) or name in CONSTRUCTED:
            functions[name] = value
        for member, what in vars(value).items() if inspect.isclass(value) else ():
            if isinstance(what, property) and what.fset is not None:
                yield f"{name}.{member}"
            public = not member.startswith("_") or member in ("__call__", "__getitem__")
            if public and inspect.isfunction(what) and not {member, f"{name}.{member}"} & PASSED_ON.keys():
                functions[f"{name}.{member}"] = what
    for name, function in functions.items():
        yield from (f"{name}({each})" for each in inspect.signature(function).parameters if each != "self")


def outcome(parameter, value):
    """What a call raises, or ``None``."""
    try:
        parameter.call(value)
    except Reached:
        return None
    except Exception as error:
        return error
    return None


def test_every_public_parameter_has_a_row():
    assert set(parameters()) == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.filterwarnings("ignore")
def test_valid_values_are_taken(name):
    parameter = PARAMETERS[name]
    assert outcome(parameter, parameter.valid) is None
    assert parameter.fits <= VALUES.keys()


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.filterwarnings("ignore")
def test_wrong_values_are_refused_by_name(name):
    parameter, failures = PARAMETERS[name], []
    noun = parameter.called or re.search(r"\w+(?=\W*$)", name)[0]
    for what, value in [*VALUES.items(), *((repr(value)[:40], value) for value in parameter.wrong)]:
        error, text = outcome(parameter, value), ""
        if isinstance(error, gpuaug.GpuAugError):
            text = str(error)
        if what in parameter.fits:
            if error is not None:
                failures.append(f"{what}: fits, but raises {error!r:.200}")
        elif error is None:
            failures.append(f"{what}: taken")
        elif isinstance(error, parameter.foreign):
            continue
        elif not text:
            failures.append(f"{what}: {type(error).__name__}: {str(error)[:100]}")
        elif not re.search(rf"\b({noun})\b", text, re.IGNORECASE) or len(text) > LONGEST:
            failures.append(f"{what}: {len(text)} characters, {text[:200]}")
    assert not failures, "\n".join(failures)
