"""What is published: the package's metadata, the pages about versions, the workflow, and the command that builds a release."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from support.public import llms

import gpuaug
from bench.figures import tables
from gpuaug.decode.clips import libav

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
METADATA = PROJECT["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PUBLIC_HOSTS = {"gpuaug.readthedocs.io", "github.com"}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_every_file_that_names_the_version_names_the_same():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())
    version, date = re.findall(r"^## (\d\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    named = {METADATA["version"], gpuaug.__version__, citation["version"], recipe["context"]["version"], version}
    assert named == {METADATA["version"]}
    assert citation["date-released"] == date
    assert llms.FILE.read_text().startswith(f"# gpuaug {version}\n")


def test_links_of_the_project_are_public():
    urls = METADATA["urls"]
    assert set(urls) == {"Documentation", "Source", "Issues", "Changelog"}
    assert {url.split("/")[2] for url in urls.values()} == PUBLIC_HOSTS
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    about = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())["about"]
    assert {citation["repository-code"], about["repository"]} == {urls["Source"]}
    site = re.search(r"^site_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)[1]
    assert {citation["url"], about["documentation"], site} == {urls["Documentation"]}
    assert citation["license"] == about["license"] == METADATA["license"]


def test_recipe_for_conda_has_the_requirements_of_the_package():
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())

    def specifiers(texts):
        requirements = [Requirement(text.replace("pytorch ", "torch ")) for text in texts]
        return {requirement.name: str(requirement.specifier) for requirement in requirements}

    python = {"python": METADATA["requires-python"]}
    assert specifiers(recipe["requirements"]["run"]) == specifiers(METADATA["dependencies"]) | python
    build = specifiers(PROJECT["build-system"]["requires"])
    assert specifiers(recipe["requirements"]["host"]) == build | python | {"pip": ""}
    scripts = [f"{name} = {target}" for name, target in METADATA["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    assert recipe["about"]["summary"] == METADATA["description"]


def test_message_about_an_old_pyav_names_the_version_that_the_extra_requires():
    requirements = [Requirement(text) for text in METADATA["optional-dependencies"]["video"]]
    assert [str(each.specifier) for each in requirements if each.name == "av"] == [f">={libav.OLDEST}"]


def test_package_imports_no_module_of_the_network():
    """The sentence about telemetry in README.md."""
    network = {"aiohttp", "ftplib", "http", "httpx", "requests", "smtplib", "socket", "ssl", "urllib", "urllib3", "xmlrpc"}
    found = {}
    for path in (ROOT / "gpuaug").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {f"{path.name}: {name}": name for name in names if name.split(".")[0] in network}
    assert found == {}
    assert "gpuaug has no telemetry" in (ROOT / "README.md").read_text()


# The pages.


def test_file_for_language_models_is_up_to_date():
    assert llms.FILE.read_text() == llms.text(), "run PYTHONPATH=tests:. python -m support.public.llms"


def test_file_for_language_models_has_every_name_in_the_order_of_a_migration():
    text = llms.FILE.read_text()
    first = re.findall(r"^\d\. `(?:torch\.utils\.data\.)?(\w+)", text, re.MULTILINE)
    assert first == ["DataLoader", "StreamedLoader", "DecodeStage", "TransformStage", "fuse", "FeatureStage"]
    rest = re.findall(r"^- `(\w+)", text, re.MULTILINE)
    assert sorted(first[1:] + rest) == sorted(gpuaug.__all__)


def test_table_of_what_to_change_names_what_the_changelog_says():
    text = (ROOT / "docs" / "upgrading.md").read_text()
    release = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert f"# Upgrade to {METADATA['version'].rpartition('.')[0]}\n" in text
    assert "docs/upgrading.md" in release
    changes = release.split("\n### You must change\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| (.*) \| (.*) \|$", text, re.MULTILINE)[2:]
    assert len(rows) >= 20
    words = {word for row in rows for code in re.findall(r"`([^`]+)`", row[0]) for word in re.findall(r"\w+", code)}
    assert {word for word in words if word not in changes} == set()


def test_tested_versions_are_those_on_which_something_ran():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    stacks = json.loads((ROOT / "tests/project/stacks.json").read_text())
    keys = ("python", "torch", "triton", "torchvision", "kornia", "numpy", "device", "ran")
    rows = [f"| {' | '.join(stack[key] for key in keys)} |" for stack in stacks]
    assert re.findall(r"^\| \d.*\|$", page, re.MULTILINE) == rows
    tested = dict(re.findall(r"^\| ([^|]+) \| ([^|]*) \|[^|]*\|[^|]*\|$", page, re.MULTILINE))
    for key, name, parts in (
        *(("python", "Python", 2), ("numpy", "NumPy", 2), ("torchvision", "torchvision", 2), ("kornia", "Kornia", 3)),
        *(("torch", "torch, with its Triton", 2), ("triton", "torch, with its Triton", 2)),
    ):
        ran = {".".join(stack[key].partition("+")[0].split(".")[:parts]) for stack in stacks}
        named = set(re.findall(r"\d+(?:\.\d+)+", tested[name]))
        assert ran <= named, name
        assert named <= ran or key in ("torch", "triton"), name
    pythons = {text.rpartition(" ")[2] for text in METADATA["classifiers"] if re.search(r"Python :: 3\.\d", text)}
    assert pythons == {".".join(stack["python"].split(".")[:2]) for stack in stacks}


def test_facts_about_cards_are_those_of_the_stored_results():
    stacks = json.loads((ROOT / "tests/project/stacks.json").read_text())
    results = [json.loads(path.read_text())["environment"] for path in (ROOT / "bench" / "results").glob("*.json")]
    on_cards = [environment for environment in results if environment.get("gpu")]
    keys = ("python", "torch", "triton", "torchvision", "kornia", "numpy")
    for stack in stacks:
        if stack["device"] != "CPU":
            found = [each for each in on_cards if all(each["versions"][key] == stack[key] for key in keys)]
            for card in stack["device"].split(", "):
                assert any(card in environment["gpu"]["name"] for environment in found), card
    cuda = {environment["versions"]["cuda"] for environment in on_cards}
    assert [f"| CUDA of torch | {version} |" in (ROOT / "docs/compatibility.md").read_text() for version in cuda] == [True]


def test_tables_of_the_readme_fit_a_screen():
    text = (ROOT / "README.md").read_text()
    section = text.split("\n## What it measures\n")[1].split("\n## ")[0]
    assert len(section.splitlines()) <= 42
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) <= 24, "rows of all tables of the page"
    assert max(len(line) for line in lines) <= 120
    assert "docs/benchmarks/files.md" in section, "links to the rest"
    assert "docs/benchmarks/augmentation.md" in section, "links to the rest"
    assert text == tables.rewrite(text, {path.stem: json.loads(path.read_text()) for path in tables.RESULTS.glob("*.json")})


# The workflow.


def commands(workflow):
    """Lines that the steps of a workflow run."""
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [line for job in jobs.values() for step in job["steps"] for line in step.get("run", "").splitlines()]


def release_command():
    """The line of CONTRIBUTING.md that builds a release."""
    (line,) = re.findall(r"^(pip install .* python -m build .*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    return line


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_is_valid_and_needs_only_jobs_that_exist(workflow):
    parsed = yaml.safe_load(workflow.read_text())
    assert parsed[True], "YAML reads the key on as a truth value"
    for job in parsed["jobs"].values():
        assert job["runs-on"]
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
        assert set(job.get("needs", [])) <= set(parsed["jobs"])
        for value in re.findall(r"matrix\.(\w+)", json.dumps(job)):
            assert value in job["strategy"]["matrix"]


def test_jobs_of_the_workflow():
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    assert set(jobs) == {"lint", "types", "newest", "oldest", "docs", "package", "gpu"}
    assert jobs["gpu"]["if"] == "vars.GPU_RUNNER != ''", "skipped without a runner"
    assert jobs["package"]["permissions"]["attestations"] == "write"
    uses = " ".join(step.get("uses", "") for step in jobs["package"]["steps"])
    assert "attest-build-provenance" in uses
    assert "attest-sbom" in uses
    install = next(step["run"] for step in jobs["oldest"]["steps"] if "run" in step)
    assert install in (ROOT / "CONTRIBUTING.md").read_text(), "the command for the oldest versions"


def test_workflow_builds_as_the_command_of_the_contributors_does():
    parts = [part.removeprefix("PYTHONPATH=tests:. ") for part in release_command().split(" && ")]
    run = [line for workflow in WORKFLOWS for line in commands(workflow)]
    installs = [part for part in parts if part.startswith("pip install")]
    assert set(parts) - {*installs, "python -m support.public.llms"} <= set(run)


EXTRAS = {"pytest": "test", "ruff": "test", "mypy": "test", "mkdocs": "docs"}
MODULES = {"build": "build", "twine": "twine", "cyclonedx_py": "cyclonedx-bom"}
"""Module → distribution of the extra ``release`` that has it."""


@pytest.mark.parametrize(
    "command", sorted({*(line for path in WORKFLOWS for line in commands(path)), *release_command().split(" && ")})
)
def test_commands_of_the_workflow_and_of_the_release_exist(command):
    extras = METADATA["optional-dependencies"]
    words = command.removeprefix("PYTHONPATH=tests:. ").split()
    for extra in re.findall(r"\.\[([\w,-]+)\]", command):
        assert set(extra.split(",")) <= set(extras)
    for marker in re.findall(r"-m (gpu|slow|frameworks)", command):
        assert any(line.startswith(f"{marker}:") for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"])
    if words[:2] == ["python", "-m"]:
        if words[2] in MODULES:
            assert any(Requirement(text).name == MODULES[words[2]] for text in extras["release"])
        else:
            assert importlib.util.find_spec(words[2])
    elif words[0] != "pip":
        assert any(Requirement(text).name.startswith(words[0]) for text in extras[EXTRAS[words[0]]])
    files = [word for word in words if re.fullmatch(r"[\w/.-]+\.(toml|py|md|yml)", word)]
    assert all((ROOT / file).exists() for file in files)


# Slow: the oldest versions of the extras, the command itself, and the wheel in an environment of its own.


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_extras_work_in_the_oldest_versions_that_they_allow(tmp_path):
    extras = METADATA["optional-dependencies"]
    requirements = [Requirement(text) for extra in ("decode", "decode-cpu", "video", "cache") for text in extras[extra]]
    oldest = [
        f"{requirement.name}=={next(iter(requirement.specifier)).version}.*"
        for requirement in requirements
        if requirement.name not in ("gpuaug", "PyNvVideoCodec") and (not requirement.marker or requirement.marker.evaluate())
    ]
    packages = tmp_path / "packages"  # with the NumPy that they need, which may be older than that of this environment
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", packages, *oldest], check=True)
    variables = {"PYTHONPATH": f"{packages}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT / "tests/decode", ROOT / "tests/cache"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def run(command, folder, environment_of, **options):
    """Run a shell command with the programs of a virtual environment, and without a GPU."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"PATH": f"{environment_of / 'bin'}:{variables['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, shell=True, cwd=folder, env=variables, text=True, capture_output=True, **options)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A new clone of the commit, with what the command of CONTRIBUTING.md built in it.

    The environment sees the packages of this one, because the command needs gpuaug's own requirements, which take gigabytes.
    """
    folder = tmp_path_factory.mktemp("release")
    subprocess.run(["git", "clone", "--quiet", ROOT, folder / "clone"], check=True)
    venv.create(folder / "tools", with_pip=True)
    packages = folder / "tools" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (packages / "of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
    done = run(release_command(), folder / "clone", folder / "tools", timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2, "twine, of both files"
    return folder / "clone"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_command_of_the_contributors_builds_a_release(clone):
    names = {path.name for path in (clone / "dist").iterdir()}
    stem = f"gpuaug-{METADATA['version']}"
    assert names == {f"{stem}.tar.gz", f"{stem}-py3-none-any.whl", "sbom.cdx.json"}
    with zipfile.ZipFile(clone / "dist" / f"{stem}-py3-none-any.whl") as wheel:
        assert {name.split("/")[0] for name in wheel.namelist()} == {"gpuaug", f"{stem}.dist-info"}
        metadata = Parser().parsestr(wheel.read(f"{stem}.dist-info/METADATA").decode())
    assert dict(url.split(", ") for url in metadata.get_all("Project-URL")) == METADATA["urls"]
    assert metadata.get_all("Classifier") == METADATA["classifiers"]
    with tarfile.open(clone / "dist" / f"{stem}.tar.gz") as sdist:
        files = {Path(name).relative_to(stem).parts[0] for name in sdist.getnames()}
    assert {"gpuaug", "CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"} <= files
    components = json.loads((clone / "dist" / "sbom.cdx.json").read_text())["components"]
    assert {"torch", "torchvision", "kornia", "numpy"} <= {component["name"] for component in components}
    assert (clone / "site" / "llms.txt").read_text() == llms.FILE.read_text()
    assert subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True).stdout == ""


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_wheel_runs_the_quickstart_in_an_environment_without_a_gpu(clone, tmp_path):
    wheel = next((clone / "dist").glob("*.whl"))
    try:
        venv.create(tmp_path / "user", with_pip=True)
        done = run(f"pip install --quiet '{wheel}[decode,bench]'", tmp_path, tmp_path / "user", timeout=1800)
        assert done.returncode == 0, done.stdout + done.stderr
        page = (ROOT / "docs" / "quickstart.md").read_text()
        script = [*BLOCK.findall(page), "import torch\nassert not torch.cuda.is_available()\nprint(gpuaug.__file__)\n"]
        (tmp_path / "quickstart.py").write_text("\n".join(script))
        done = run("gpuaug --version && python quickstart.py", tmp_path, tmp_path / "user", timeout=400)
    finally:
        shutil.rmtree(tmp_path / "user")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"gpuaug {METADATA['version']}\n")
    assert done.stdout.splitlines()[-1].startswith(str(tmp_path / "user"))
