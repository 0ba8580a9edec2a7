"""``gpuaug profile``, the command."""

import json
import sys
import time

import pytest
from support.process import processes
from support.profiler import virtual_clock

import gpuaug
from bench.harness.result_check import check_result
from gpuaug import cli
from gpuaug.benchkit import environment, results

MODULE = """
import time
import torch
import gpuaug

ran = []

def slow(images):
    time.sleep(0.002)
    return images

def step(batch):
    time.sleep(0.001)

def make():
    ran.append(1)
    loader = gpuaug.StreamedLoader([(torch.ones(4, 3), torch.ones(4))] * 9, [slow], device="cpu")
    return loader, step

def alone():
    return make()[0]

def three():
    return (*make(), 3)

def turned():
    return make()[::-1]

def fails():
    raise ZeroDivisionError("in make")

number = 3
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with modules that a command can name. Each test's are its own. Time passes only while they sleep."""
    monkeypatch.setattr(time, "sleep", virtual_clock.install(monkeypatch).sleep)
    name = f"project_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield name
    for found in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[found]


def run(*arguments):
    return cli.main(["profile", *arguments, "--batches", "8", "--rounds", "1"])


def refused(capsys, *arguments):
    """What the command says, in one line, when it refuses."""
    with pytest.raises(SystemExit) as left:
        run(*arguments)
    assert left.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.split("error: ", 1)[1].strip()


def test_command_prints_the_report_and_writes_json(project, tmp_path, capsys):
    path = tmp_path / "new" / "profile.json"
    assert run(f"{project}:make", "--json", str(path)) == 0
    printed = capsys.readouterr().out
    assert printed.count("ms per batch") >= 1
    assert "stage/slow" in printed or "stage/transform" in printed
    bound = "Bounded by the training thread, most of all by transform 'transform' (slow) (2 of 3 ms)."
    assert bound in " ".join(printed.split())
    result = json.loads(path.read_text())
    check_result(result)
    assert result["suite"] == "profile"
    assert [row["name"] for row in result["rows"]][:4] == ["load", "copy", "stage/transform", "step"]
    assert result["settings"]["batches"] == 8
    assert result["settings"]["rounds"] == 1
    assert result["settings"]["verdict"][0].startswith(bound)


def test_environment_is_read_before_the_profile_changes_load_and_clocks(project, tmp_path, monkeypatch):
    order = []
    for owner, name in ((environment, "environment"), (results, "read_environment"), (gpuaug, "profile")):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, of=function, name=name, **k: order.append(name) or of(*a, **k))
    assert run(f"{project}:make", "--json", str(tmp_path / "profile.json")) == 0
    assert order == ["environment", "profile"]


@pytest.mark.parametrize(("suffix", "sign"), [(".png", b"\x89PNG"), (".json", b'{"traceEvents"')])
def test_timeline_is_written(project, tmp_path, suffix, sign):
    path = tmp_path / "pictures" / f"timeline{suffix}"
    assert run(f"{project}:make", "--timeline", str(path)) == 0
    assert path.read_bytes().startswith(sign)


def test_command_in_a_process_of_its_own(project, tmp_path):
    arguments = ["profile", f"{project}:make", "--batches", "8", "--rounds", "1"]
    done = processes.run_script(f"import sys; from gpuaug.cli import main; sys.exit(main({arguments}))")
    assert done.returncode == 0, done.stderr
    assert "stage/transform" in done.stdout
    progress = ["warm-up", "round 1 of 1", "parts of the step"]
    assert done.stderr.splitlines() == [f"gpuaug.profile: {text}" for text in progress], "in a file too"


def test_target_may_be_a_file(project, tmp_path, capsys, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "helper.py").write_text("def ready():\n    print('beside it')\n")
    with (tmp_path / "inner" / f"{project}.py").open("w") as file:
        file.write("from dataclasses import dataclass\nfrom helper import ready\nready()\n" + MODULE)
        file.write("@dataclass\nclass Named:\n    field: 'int'\n")  # dataclasses look their own module up
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    assert run(f"inner/{project}.py:make") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("beside it\n")
    assert "stage/transform" in printed
    del sys.modules["helper"]


MISSING = "target must be in a module that can be imported, got {!r}. Run the command in the module's folder."
REFUSED = {
    "inner/train.py:make": "target must name an existing file, got 'inner/train.py'. Pass its path from the working directory.",
    **{
        target: f"target must be train.py:make or package.module:make, got {target!r}. "
        "Name a function that returns a loader and a step."
        for target in ("package.module", "package.module:", ":make", "", "./train:make", "train.py")
    },
    **{f"{module}:make": MISSING.format(module) for module in ("no_such_module", "no_such.module")},
    "project.inner:make": MISSING.format("project.inner"),
    "project:mak": "target must name a function of project, got 'mak'. "
    "project has: alone, fails, make, slow, step, three, turned.",
    "project:alone": "project:alone must return a loader and a step, got StreamedLoader. Write: return loader, step.",
    "project:three": "project:three must return a loader and a step, got 3 values. Write: return loader, step.",
    "project:turned": "loader must be a StreamedLoader, got function. The loader is the first argument, the step the second.",
}


@pytest.mark.parametrize("target", REFUSED)
def test_target_that_cannot_be_profiled_is_refused(target, project, capsys):
    text = REFUSED[target].replace("project", project) if target.startswith("project") else REFUSED[target]
    assert refused(capsys, target.replace("project", project)) == text


def test_import_error_of_the_module_is_raised(project, tmp_path):
    (tmp_path / f"{project}.py").write_text("import surely_not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="No module named 'surely_not_installed'"):
        run(f"{project}:make")


def test_error_of_the_target_is_raised(project):
    with pytest.raises(ZeroDivisionError, match="in make"):
        run(f"{project}:fails")


@pytest.mark.parametrize("name", ["picture.gif", "picture", "picture.png.txt"])
def test_timeline_suffix_is_refused_before_the_import(name, project, capsys):
    assert refused(capsys, f"{project}:make", "--timeline", name) == (
        f"--timeline must end with one of .png, .svg, .pdf, .json, got {name!r}. The suffix selects the format."
    )
    assert project not in sys.modules


def test_timeline_picture_without_matplotlib_is_refused(project, capsys, monkeypatch):
    find = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert refused(capsys, f"{project}:make", "--timeline", "picture.png") == (
        "No timeline can be drawn, because matplotlib is not installed. Run pip install matplotlib, or pass a file "
        "that ends with .json."
    )


@pytest.mark.parametrize("flag", ["json", "timeline"])
@pytest.mark.parametrize("path", ["folder.json", "file/results.json", "file/folder/results.json"])
def test_output_file_that_cannot_be_written_is_refused(flag, path, project, tmp_path, capsys):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").touch()
    output = str(tmp_path / path)
    assert refused(capsys, f"{project}:make", f"--{flag}", output) == (
        f"argument --{flag}: value must be a file that can be written, got {output!r}. Pass a path such as out.json."
    )
    assert project not in sys.modules


@pytest.mark.parametrize(("flag", "least"), [("--batches", 8), ("--rounds", 1)])
def test_batches_and_rounds_below_their_least_are_refused(flag, least, project, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["profile", f"{project}:make", flag, str(least - 1)])
    assert left.value.code == 2
    text = (
        f"argument {flag}: value must be a whole number of at least {least}, got '{least - 1}'. Leave it out for the default."
    )
    assert text in " ".join(capsys.readouterr().err.split())
