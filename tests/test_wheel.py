"""The built wheel, installed alone: it imports, and its command runs."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from lowtide import __version__

ROOT = Path(__file__).parents[1]

# A strategy without compiled loops: compiling them anew for each wheel takes longer than all the rest.
OPTIONS = ("--memory", "2GiB", "--strategy", "dynamic-selection", "-o", "s.json", "--json")

pytestmark = pytest.mark.slow


def run(*command, cwd):
    """A command that must succeed, in an environment where nothing points to the source."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel):
    """An empty virtual environment with the wheel alone; the dependencies are those of this interpreter."""
    folder = wheel.parent / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=wheel.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    # The packages of this interpreter come after the wheel, without its .pth files: an editable lowtide stays unseen.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_it_holds_every_file_of_the_package(wheel):
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "lowtide").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.partition("/")[0].endswith(".dist-info")}
    assert packed == files
    assert "lowtide/py.typed" in packed


def test_it_asks_for_no_more_than_it_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
    asked = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    always = {re.match(r"\w+", line).group() for line in asked if "extra ==" not in line}
    assert always == {"torch", "numpy", "numba", "scipy", "typer", "rich"}
    assert "torch>=2.10" in asked
    assert "matplotlib>=3.8; extra == 'plot'" in asked
    assert "Requires-Python: >=3.11" in lines


def test_it_imports_from_where_it_is_installed(installed):
    program = "import lowtide; print(lowtide.__file__); print(lowtide.__version__)"
    where, version = run(installed / "bin" / "python", "-c", program, cwd=installed).splitlines()
    assert Path(where).is_relative_to(installed)
    assert version == __version__


def test_its_command_runs(installed):
    lowtide = installed / "bin" / "lowtide"
    assert run(lowtide, "--version", cwd=installed) == f"lowtide {__version__}\n"
    chain = ROOT / "examples" / "chains" / "alexnet-b128.json"
    solved = json.loads(run(lowtide, "solve", chain, *OPTIONS, cwd=installed))
    assert solved["feasible"]
    simulated = json.loads(run(lowtide, "simulate", chain, "s.json", "--json", cwd=installed))
    assert simulated["peak_bytes"] == solved["peak_bytes"]
