"""How many cases the tests in ``fuzz/`` try, and which errors hostile data may raise."""

from hypothesis import HealthCheck, settings

import gpuaug

NIGHT = 20
"""Times as many cases, drawn anew in each run, with ``--hypothesis-profile=night``."""


def cases(count):
    """Try ``count`` cases, the same in every run."""
    night = settings.default is settings.get_profile("night")
    return settings(
        max_examples=count * (NIGHT if night else 1),
        derandomize=not night,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


def outcome(call, *arguments, **options):
    """What a call returns; or its error, if that is gpuaug's own, or another's with a note of gpuaug that says where."""
    try:
        return call(*arguments, **options)
    except gpuaug.GpuAugError as error:
        return error
    except Exception as error:
        if not any(note.startswith("gpuaug: raised by ") for note in getattr(error, "__notes__", ())):
            raise
        return error
