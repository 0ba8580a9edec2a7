"""Every place of the tree that gives a user a text: an error, a warning, a note at an error, or the end of a command."""

import ast
import gc
import itertools
import re
from collections import defaultdict
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
KINDS = {
    "ArgumentError": ValueError,
    "ArgumentTypeError": TypeError,
    "SelectionError": LookupError,
    "DecodeError": ValueError,
    "DeviceError": RuntimeError,
    "IteratorEndedError": RuntimeError,
}
SCRIPTS = {"SystemExit", "ValueError", "FileNotFoundError"}
"""What the scripts of ``bench/`` raise: whoever runs one reads the text, and catches nothing."""
CHECKS = ("whole_number", "fraction", "flag", "one_of")
"""Functions of ``core/errors.py`` that check a value. Each call of one is a site, of the name and the advice that it passes."""
SENTENCE = re.compile(r"\W*[A-Z]\S*( \S+){2,}")
"""What is filled in where an f-string has it as a part: advice is made of sentences, other parts are values."""
DEEPEST = 3
"""Number of calls that an argument is followed through."""


class Site(NamedTuple):
    """A place that raises, warns, adds a note, or ends a command."""

    where: str
    function: str
    kind: str
    texts: list[str]
    """What the place itself says, with ``…`` for each value that is filled in."""
    listed: list[str]
    """The same, with what its function is passed and returned by the callers and helpers filled in where it is a text."""
    passes_on: bool
    """Whether it passes on the text of an error that it has caught."""


@contextmanager
def no_garbage_collection():
    """Leave out garbage collections: syntax trees are no garbage, and to walk over them takes longer than to parse them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
@no_garbage_collection()
def sources(folder):
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in sorted((ROOT / folder).rglob("*.py"))]


def nodes(tree):
    """All nodes of a tree that have parts, as ``ast.walk`` gives them in three times the time."""
    found = [tree]
    for node in found:
        for value in vars(node).values():
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and value._fields:  # other nodes are shared markers, such as ast.Load
                found.append(value)
    return found


@cache
@no_garbage_collection()
def nodes_of(folder):
    """(path, all nodes) of each file."""
    return [(path, nodes(tree)) for path, tree in sources(folder)]


def literal(node):
    """The text of a string or an f-string, with ``…`` for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


class File(NamedTuple):
    path: Path
    nodes: list
    """All nodes that have parts, in the order of the function `nodes`."""
    functions: dict
    """Innermost function of each node, by the node's id."""
    names: dict
    """Qualified name of each function, by its id."""
    parents: dict
    """Node that holds each node, by the node's id."""

    def holders(self, node):
        """The nodes that hold a node, from the innermost."""
        while id(node) in self.parents:
            node = self.parents[id(node)]
            yield node


def read(path, tree):
    functions, names, parents, found = {}, {}, {}, [tree]
    inside = {id(tree): (None, "")}
    for node in found:
        function, name = inside[id(node)]
        for value in vars(node).values():
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and child._fields:  # other nodes are shared markers, such as ast.Load
                    found.append(child)
                    parents[id(child)], functions[id(child)] = node, function
                    inside[id(child)] = function, name
                    if isinstance(child, ast.FunctionDef | ast.ClassDef):
                        names[id(child)] = inner = f"{name}.{child.name}".lstrip(".")
                        inside[id(child)] = child if isinstance(child, ast.FunctionDef) else function, inner
    return File(path, found, functions, names, parents)


class Texts:
    """The texts that expressions of one folder may give."""

    def __init__(self, folder):
        self.files = [read(path, tree) for path, tree in sources(folder)]
        self.assigned = {file.path: defaultdict(list) for file in self.files}
        self.calls, self.defined = defaultdict(list), defaultdict(list)
        for file in self.files:
            for node in file.nodes:
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        self.assigned[file.path][ast.unparse(target)].append(node.value)
                elif isinstance(node, ast.Call):
                    self.calls[ast.unparse(node.func).rpartition(".")[2]].append((file, node))
                elif isinstance(node, ast.FunctionDef):
                    self.defined[node.name].append((file, node))

    def of(self, node, file, bound=None, seen=()):
        """The texts of an expression. ``bound`` has those of parameters; ``None`` follows neither parameters nor calls."""
        name = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else None
        if bound and name in bound:
            return bound[name]
        if name is not None and name not in seen and name in self.assigned[file.path]:
            mine = self.assigned[file.path][name]
            function = file.functions.get(id(node))
            if bound is not None and isinstance(node, ast.Name):
                inside = [value for value in mine if file.functions.get(id(value)) is function]
                mine = self.last(node, inside, file) or [value for value in mine if file.functions.get(id(value)) is None]
            return [text for value in mine for text in self.of(value, file, bound, (*seen, name))] or ["…"]
        if isinstance(node, ast.IfExp):
            return self.of(node.body, file, bound, seen) + self.of(node.orelse, file, bound, seen)
        if isinstance(node, ast.BoolOp):
            return [text for value in node.values for text in self.of(value, file, bound, seen)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            ends = self.of(node.right, file, bound, seen)
            return [text + end for text in self.of(node.left, file, bound, seen) for end in ends]
        if isinstance(node, ast.JoinedStr):
            return self.joined(node, file, bound, seen)
        if isinstance(node, ast.Call) and bound is not None and len(seen) < DEEPEST:
            return self.returned(node, file, seen)
        return [literal(node)]

    @staticmethod
    def last(node, values, file):
        """Those of the values assigned to a name that it may have at a node: the last, and others before it in branches."""
        found, around = [], {id(each) for each in file.holders(node)}
        for value in sorted((each for each in values if each.lineno <= node.lineno), key=lambda each: -each.lineno):
            found.append(value)
            if id(file.parents[id(file.parents[id(value)])]) in around:
                break
        return found[::-1] or values

    def joined(self, node, file, bound, seen):
        parts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                parts.append([part.value])
                continue
            found = [] if bound is None or part.conversion != -1 else self.of(part.value, file, bound, seen)
            parts.append([text if SENTENCE.match(text) else "…" for text in found] or ["…"])
        return ["".join(chosen) for chosen in itertools.product(*map(dict.fromkeys, parts))]

    def returned(self, call, file, seen):
        """The texts that a function of this folder returns."""
        name = ast.unparse(call.func).rpartition(".")[2]
        defined = self.defined[name] if not hasattr(str, name) else []
        there = [each for each in defined if each[0] is file] or (defined if len(defined) == 1 else [])
        found = []
        for other, function in there:
            bindings = self.arguments(function, call, file, (*seen, name)) if name not in seen else {}
            for node in nodes(function):
                if isinstance(node, ast.Return) and node.value is not None and other.functions[id(node)] is function:
                    found += self.of(node.value, other, bindings, (*seen, name))
        return list(dict.fromkeys(found)) or ["…"]

    def arguments(self, function, call, file, seen):
        """The texts of a function's parameters in one call of it."""
        names = [each.arg for each in function.args.posonlyargs + function.args.args]
        if names[:1] in (["self"], ["cls"]):
            del names[0]
        nodes = dict(zip(names, call.args, strict=False)) | {each.arg: each.value for each in call.keywords if each.arg}
        outer = self.callers(file.functions.get(id(call)), file, seen)
        found = {}
        for name, node in nodes.items():
            texts = dict.fromkeys(text for bound in outer for text in self.of(node, file, bound, seen))
            if any(re.search(r"\w", text) for text in texts):
                found[name] = list(texts)
        return found

    def callers(self, function, file, seen=()):
        """What each call of a function binds, or one empty binding."""
        if function is None or len(seen) >= DEEPEST:
            return [{}]
        unique = len(self.defined[function.name]) == 1 and not function.name.startswith("__")
        bindings = []
        for other, call in self.calls[function.name]:
            if unique or (other is file and not function.name.startswith("__")):
                found = self.arguments(function, call, other, (*seen, function.name))
                if found not in bindings:
                    bindings.append(found)
        return bindings or [{}]


def sites_of(folder, raised):
    """The sites of one folder."""
    found, every = [], Texts(folder)
    for file in every.files:
        caught = set()
        for node in file.nodes:
            if isinstance(node, ast.ExceptHandler):
                caught |= {id(each) for each in nodes(node) if isinstance(each, ast.Name) and each.id == node.name}
        for node in file.nodes:
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = ast.unparse(node.func)
            kind, function = called.rpartition(".")[2], file.functions[id(node)]
            text, checks = node.args[0], kind in CHECKS
            if file.path.name == "errors.py" and kind == "warn":
                continue
            if called == "warn":
                kind = "GpuAugWarning"
            elif kind == "add_note" and file.path.name != "errors.py":
                text, kind = node.args[-1], "note"
            elif not (kind in raised or checks or called == "parser.error"):
                continue
            if checks:
                way_out = next((each.value for each in node.keywords if each.arg == "way_out"), node.args[-1])
                ends = itertools.product(every.of(text, file, {}), every.of(way_out, file, {}))
                texts, listed = [], [f"{name} must be …, got …. {end}" for name, end in ends]
            else:
                texts = every.of(text, file)
                bindings = [{}] if file.path.name == "errors.py" else every.callers(function, file)
                listed = [each for bound in bindings for each in every.of(text, file, bound)]
            texts, listed = ([each for each in dict.fromkeys(many) if re.search(r"\w", each)] for many in (texts, listed))
            passes_on = any(id(each) in caught for each in nodes(text))
            name = file.names[id(function)] if function else ""
            found.append(Site(f"{file.path}:{node.lineno}", name, kind, texts, listed, passes_on))
    return found


@cache
@no_garbage_collection()
def sites():
    """Every place of the tree that gives a user a text."""
    return [*sites_of("gpuaug", {*KINDS, "GpuAugError"}), *sites_of("bench", {*KINDS, *SCRIPTS})]
