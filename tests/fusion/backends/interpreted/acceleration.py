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
    *(f"__{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")),
    *(f"__{name}__" for name in ("radd", "rsub", "rmul", "rtruediv", "lt", "le", "gt", "ge", "eq", "ne", "neg", "invert")),
    *("abs", "ceil", "div_rn", "exp", "floor", "fma", "maximum", "minimum", "sqrt_rn", "to", "where"),
    *("__getitem__", "arange", "broadcast_to", "full", "load", "reshape", "trans"),
}
"""Names of the language's functions whose steps depend on the types of tensors and on constants alone."""

FUNCTION_LAST = {"binary_op", "ternary_op", "unary_op"}
"""Methods of the builder that apply their last argument, a function of NumPy's, to the values of the others."""

ELEMENTWISE = {*FUNCTION_LAST, "cast_impl", "create_addptr", "create_idiv", "create_fabs", "create_fma"}
"""Methods of the builder that compute with arrays of different shapes what they do with arrays broadcast to one shape."""


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
            # The innermost of elementwise methods says what is computed. Of others, the outermost has all arguments.
            if isinstance(made, TensorHandle) and not (id(made) in self.makers and self.makers[id(made)][1] in ELEMENTWISE):
                self.makers[id(made)] = made, name, args, kwargs
            return made

        return recorded


class UnknownSourceError(Exception):
    """A value that no method of the builder made."""


def replay_steps(value, makers, inputs, arrays):
    """Function from the arrays of the inputs to that of a value, or to one that NumPy broadcasts to its shape."""
    for index, source in enumerate(inputs):
        if value is source:
            return lambda arrays: arrays[index]
    if id(value) not in makers:
        raise UnknownSourceError
    _, name, args, kwargs = makers[id(value)]
    if name.startswith("get_"):
        constant = value.data
        return lambda arrays: constant
    if name in ("create_splat", "create_broadcast"):
        (source,) = (arg for arg in args if isinstance(arg, TensorHandle))
        return replay_steps(source, makers, inputs, arrays)
    steps = replay_steps if name in ELEMENTWISE else replay_whole
    parts = {index: steps(arg, makers, inputs, arrays) for index, arg in enumerate(args) if isinstance(arg, TensorHandle)}
    if name in FUNCTION_LAST:
        return replay_function(args[-1], list(parts.values()), value.data.dtype)
    if kwargs:
        raise UnknownSourceError
    method = getattr(interpreter_builder, name)
    slots = [(parts.get(index), arg.dtype if index in parts else arg) for index, arg in enumerate(args)]
    return lambda arrays: method(*[TensorHandle(part(arrays), fixed) if part else fixed for part, fixed in slots]).data


def replay_function(function, parts, dtype):
    """Function from the arrays of the inputs to the result of a function of NumPy's."""
    if len(parts) == 2:
        left, right = parts

        def compute(arrays):
            result = function(left(arrays), right(arrays))
            return result if result.dtype == dtype else result.astype(dtype)

        return compute

    def compute_all(arrays):
        result = function(*[part(arrays) for part in parts])
        return result if result.dtype == dtype else result.astype(dtype)

    return compute_all


def replay_whole(value, makers, inputs, arrays):
    """``replay_steps`` with results of the shape of the value."""
    steps, shape = replay_steps(value, makers, inputs, arrays), value.data.shape
    return steps if steps(arrays).shape == shape else lambda arrays: np.broadcast_to(steps(arrays), shape)


def own_handle(arg):
    """A tensor with a handle of its own, which tells the two operands of x * x apart; other arguments as they are."""
    return tl.tensor(arg.handle.clone(), arg.type) if type(arg) is tl.tensor else arg


def replay_of(operation, args, kwargs):
    """(result, replay) of one call: ``replay`` maps the arrays of the inputs to the tensor of another call of these types."""
    args, kwargs = [own_handle(arg) for arg in args], {name: own_handle(arg) for name, arg in kwargs.items()}
    inputs = [arg.handle for arg in (*args, *kwargs.values()) if type(arg) is tl.tensor]
    recorder, builder = Recorder(), interpreter_semantic.builder
    interpreter_semantic.builder = recorder
    try:
        result = operation(*args, **kwargs, _semantic=interpreter_semantic)
    finally:
        interpreter_semantic.builder = builder
    if not isinstance(result, tl.tensor):
        return result, None
    handle, arrays = result.handle, [source.data for source in inputs]
    try:
        compute = replay_whole(handle, recorder.makers, inputs, arrays)
    except UnknownSourceError:
        return result, None
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

    def call(*args, _semantic=None, **kwargs):
        key, arrays = [], []
        for arg in (*args, *kwargs, *kwargs.values()) if kwargs else args:
            if type(arg) is tl.tensor:
                key.append((arg.type.name, arg.handle.data.dtype))
                arrays.append(arg.handle.data)
            else:
                key.append(repr(arg))
        key = tuple(key)
        if key not in replays:
            result, replays[key] = replay_of(operation, args, kwargs)
            return result
        replay = replays[key]
        return replay(arrays) if replay else operation(*args, **kwargs, _semantic=interpreter_semantic)

    return call


def replay_operations():
    """Work out the steps of an operation once for each combination of types and constants: two thirds of the time."""
    patch = interpreter._patch_attr

    def patch_replayed(obj, name, member, *args):
        patch(obj, name, member, *args)
        if name in OPERATIONS:
            setattr(obj, name, replayed(member))

    interpreter._patch_attr = patch_replayed
