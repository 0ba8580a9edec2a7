"""What can go wrong, in words a user can act on.

Every text has one shape: ``<what> must be <rule>, got <value>. <way out>.``
"""


class GpuAugError(Exception):
    """Base of the errors that gpuaug raises itself. Errors of the user's own code keep their type."""


class ArgumentError(GpuAugError, ValueError):
    """An argument has a value that cannot work."""


class ArgumentTypeError(GpuAugError, TypeError):
    """An argument is of a type that cannot work."""


class SelectionError(GpuAugError, LookupError):
    """``on`` or ``into`` of a stage does not fit the batch."""


class DeviceError(GpuAugError, RuntimeError):
    """A tensor or a module is on a device where the loader cannot use it."""


class IteratorEndedError(GpuAugError, RuntimeError):
    """An iterator was asked for a batch after its loader was closed or its workers were taken over by a newer one."""


class GpuAugWarning(UserWarning):
    """Something works, but slower or otherwise than the user will expect."""
