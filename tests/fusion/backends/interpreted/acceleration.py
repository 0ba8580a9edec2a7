"""Speed-ups of Triton's interpreter that change no result."""

import functools

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    InterpreterOptions,
    TensorHandle,
    interpreter_builder,
    interpreter_semantic,
)


def leave_out_overflow_checks():
    """Leave out the interpreter's checks that integers stay within 32 bits: a third of the time."""
    interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)


def patch_language_once():
    """Patch Triton's language once per launch, and not again for each function that a kernel calls: half of the time.

    Modules of Triton's own see the language under other names. These stay patched after the first call of such a function.
    """
    patched, modules = InterpretedFunction.__call__, set()

    def call(self, *args, **kwargs):
        module = self.fn.__module__
        if module in modules or module.startswith("gpuaug."):
            return self.rewrite()(*args, **kwargs)
        modules.add(module)
        return patched(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


def look_types_up_once():
    """Keep what follows from a type of Triton's alone, which the interpreter makes at each operation: a third of the time."""
    dtype_of, begin, of_block = interpreter._get_np_dtype, tl.tensor.__init__, tl.block_type.with_element_ty
    dtypes, attributes, blocks = {}, {}, {}

    def kept_dtype(kind):
        scalar = kind.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = dtype_of(scalar)
        return dtypes[scalar.name]

    def begun(self, handle, kind):
        if kind.name not in attributes:
            begin(self, handle, kind)
            attributes[kind.name] = {name: value for name, value in vars(self).items() if name not in ("handle", "type")}
        vars(self).update(attributes[kind.name], handle=handle, type=kind)

    def kept_block(self, scalar):
        key = self.name, scalar.name
        if key not in blocks:
            blocks[key] = of_block(self, scalar)
        return blocks[key]

    interpreter._get_np_dtype, tl.tensor.__init__, tl.block_type.with_element_ty = kept_dtype, begun, kept_block


OPERATIONS = {
    *(f"__{side}{name}__" for side in ("", "r") for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor")),
    *(f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne", "lshift", "rshift", "neg", "invert")),
    *("to", "where", "minimum", "maximum", "fma", "abs", "div_rn", "sqrt_rn", "floor", "ceil", "exp", "load"),
}
"""Names of the language's functions whose steps depend on the types of tensors and on constants alone."""

ELEMENTWISE = {"binary_op", "ternary_op", "unary_op"}
"""Methods of the builder that apply their last argument, a function of NumPy's, to the values of the others."""


class Recorder(InterpreterBuilder):
    """Builder that notes which of its methods made which value."""

    def __init__(self):
        vars(self).update(vars(interpreter_builder))
        self.makers = {}
        """(value, method, arguments) by the id of the value."""

    def __getattribute__(self, name):
        attribute = super().__getattribute__(name)
        if not callable(attribute) or name.startswith("__"):
            return attribute

        def recorded(*args, **kwargs):
            made = attribute(*args, **kwargs)
            # A method calls those that are elementwise with what they need. Of others, the outermost has all arguments.
            if isinstance(made, TensorHandle) and not (id(made) in self.makers and self.makers[id(made)][1] in ELEMENTWISE):
                self.makers[id(made)] = made, name, args, kwargs
            return made

        return recorded


class Unknown(Exception):
    """A value that no method of the builder made."""


def steps_of(value, makers, inputs, *, whole):
    """Function from the arrays of the inputs to that of a value. ``whole``: of its shape, and not of one that NumPy broadcasts."""
    for index, each in enumerate(inputs):
        if value is each:
            return lambda arrays: arrays[index]
    if id(value) not in makers:
        raise Unknown
    _, name, args, kwargs = makers[id(value)]
    if name.startswith("get_"):
        constant = value.data
        return lambda arrays: constant
    if name in ("create_splat", "create_broadcast"):
        (source,) = (arg for arg in args if isinstance(arg, TensorHandle))
        narrow, shape = steps_of(source, makers, inputs, whole=False), value.data.shape
        return (lambda arrays: np.broadcast_to(narrow(arrays), shape)) if whole else narrow
    elementwise = name in ELEMENTWISE
    parts = [
        steps_of(arg, makers, inputs, whole=whole if elementwise else True) if isinstance(arg, TensorHandle) else None
        for arg in args
    ]
    if elementwise:
        *parts, function = *parts[:-1], args[-1]
        dtype = value.data.dtype
        if len(parts) == 2:
            left, right = parts

            def compute(arrays):
                result = function(left(arrays), right(arrays))
                return result if result.dtype == dtype else result.astype(dtype)

        else:

            def compute(arrays):
                result = function(*(part(arrays) for part in parts))
                return result if result.dtype == dtype else result.astype(dtype)

        return compute
    if kwargs:
        raise Unknown
    method = getattr(interpreter_builder, name)
    types = [arg.dtype if part else None for part, arg in zip(parts, args, strict=True)]

    def call(arrays):
        return method(
            *(
                TensorHandle(part(arrays), kind) if part else arg
                for part, kind, arg in zip(parts, types, args, strict=True)
            )
        ).data

    return call


def replay_of(operation, args, kwargs):
    """(result, replay) of one call: ``replay`` maps the arrays of the inputs to the tensor of another call of these types."""
    # Handles of their own tell the two operands of x * x apart.
    args = [tl.tensor(arg.handle.clone(), arg.type) if type(arg) is tl.tensor else arg for arg in args]
    kwargs = {
        name: tl.tensor(arg.handle.clone(), arg.type) if type(arg) is tl.tensor else arg for name, arg in kwargs.items()
    }
    inputs = [arg.handle for arg in (*args, *kwargs.values()) if type(arg) is tl.tensor]
    recorder, builder = Recorder(), interpreter_semantic.builder
    interpreter_semantic.builder = recorder
    try:
        result = operation(*args, **kwargs)
    finally:
        interpreter_semantic.builder = builder
    if not isinstance(result, tl.tensor):
        return result, None
    handle = result.handle
    try:
        compute = steps_of(handle, recorder.makers, inputs, whole=True)
    except Unknown:
        return result, None
    arrays = [each.data for each in inputs]
    again = compute(arrays)
    if again.dtype != handle.data.dtype or again.shape != handle.data.shape or again.tobytes() != handle.data.tobytes():
        return result, None
    dtype = handle.dtype
    attributes = {name: value for name, value in vars(result).items() if name != "handle"}

    def replay(arrays):
        made = object.__new__(TensorHandle)
        made.data, made.dtype, made.attr = compute(arrays), dtype, {}
        tensor = object.__new__(tl.tensor)
        vars(tensor).update(attributes, handle=made)
        return tensor

    return result, replay


@functools.cache
def replayed(operation):
    """The operation, whose steps are worked out once for each combination of types and constants."""
    replays = {}

    def call(*args, **kwargs):
        key, arrays = [], []
        for arg in args:
            if type(arg) is tl.tensor:
                key.append(arg.type.name)
                arrays.append(arg.handle.data)
            else:
                key.append(repr(arg))
        for name, arg in kwargs.items():
            if name == "_semantic":
                continue
            key.append(name)
            if type(arg) is tl.tensor:
                key.append(arg.type.name)
                arrays.append(arg.handle.data)
            else:
                key.append(repr(arg))
        key = tuple(key)
        if key not in replays:
            result, replays[key] = replay_of(operation, args, kwargs)
            return result
        replay = replays[key]
        return replay(arrays) if replay else operation(*args, **kwargs)

    return call


def replay_operations():
    """Work out the steps of an operation once for each combination of types and constants: two thirds of the time."""
    patch = interpreter._patch_attr

    def patch_replayed(obj, name, member, *args):
        patch(obj, name, replayed(member) if name in OPERATIONS else member, *args)

    interpreter._patch_attr = patch_replayed
