"""For all tests: `--core`, and what keeps them short.

What was imported is left out of garbage collections, devices that are missing are not seeded, stages are timed in one
run, compilers keep no diary, and what one worker compiles the others load.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import logging
import re
import sys
import threading
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
# All tests in these folders need torch; elsewhere files that import it, and tests marked `torch`, do.
_NEED_TORCH = ("runtime", "gpu", "benchmarking", "zoo")
_IMPORTS_TORCH = re.compile(r"^(import|from) torch\b", re.MULTILINE)
# Modules that torch imports when it first needs them, with some 300 000 objects; the second one only where something is
# compiled, as in a run of all tests.
_IMPORTED_LATE, _IMPORTED_TO_COMPILE = "torch._dynamo", "torch._inductor.compile_fx"


_NUM_MODULES = pytest.StashKey[int]()


class _NoTorch:
    """Refuses to import torch, so that a test of the core that would need it fails by itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch":
            raise ImportError("with --core nothing may import torch; mark a test that needs it with pytest.mark.torch")
        return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", action="store_true", help="only what needs neither torch nor a browser")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("core"):
        sys.meta_path.insert(0, _NoTorch())
    if hasattr(config, "workerinput"):
        _compile_once()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("core"):
        return None
    if collection_path.is_file() and _IMPORTS_TORCH.search(collection_path.read_text(encoding="utf-8")):
        return True
    return True if collection_path.relative_to(HERE).parts[:1] in {(name,) for name in _NEED_TORCH} else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("core"):
        left_out = [item for item in items if any(map(item.get_closest_marker, ("torch", "browser")))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what is there: `fit` collects several times, each time through some 400 000 objects of torch's modules."""
    if "torch" in sys.modules:
        importlib.import_module(_IMPORTED_LATE)
        if hasattr(session.config, "workerinput"):
            importlib.import_module(_IMPORTED_TO_COMPILE)
        _seed_no_missing_device()
        _keep_no_diary()
    _freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Once more after a test that imported something: frameworks and compilers bring as much."""
    if item.config.stash.get(_NUM_MODULES, 0) != len(sys.modules):
        _freeze()
    item.config.stash[_NUM_MODULES] = len(sys.modules)


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Say it as a plain warning: to print one of a framework, the process that prints would import the framework."""
    plain = next(kind for kind in warning_message.category.__mro__ if kind.__module__ == "builtins")
    warning_message.category, warning_message.message = plain, plain(str(warning_message.message))


@pytest.fixture(autouse=True)
def _timed_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in three to nine runs: on a CPU no test depends on what a stage takes."""
    timing = sys.modules.get("lowtide.runtime.measure.timing")
    if timing is not None and request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(timing, "_FEWEST_RUNS", 1)
        monkeypatch.setattr(timing, "_MOST_RUNS", 1)


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `fit` asks whether objects are frozen: here they are, and to count them takes 30 milliseconds."""
    meter = sys.modules.get("lowtide.runtime.meter")
    if meter is not None:
        monkeypatch.setattr(meter, "_is_frozen", lambda: True)


@pytest.fixture
def short_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages for the browser with one strategy at few budgets."""
    page = importlib.import_module("lowtide.report.page")
    survey = page.survey

    def short(chain: Any, **settings: Any) -> Any:
        return survey(chain, **{**settings, "strategies": ["rotor"], "num_budgets": 3})

    monkeypatch.setattr(page, "survey", short)


def _compile_once() -> None:
    """Let workers that call a kernel for the first time wait for the one that compiles it, and load the result."""
    from numba.core.dispatcher import Dispatcher

    compile_alone, compiling = Dispatcher.compile, threading.local()

    def compile_or_wait(self: Any, signature: Any) -> Any:
        folder = self._cache.cache_path
        if folder is None or getattr(compiling, "is_inside", False):
            return compile_alone(self, signature)  # it is not kept on disk, or a part of what is being compiled
        compiling.is_inside = True
        try:
            with Path(folder, f"{self.py_func.__module__}.{self.py_func.__qualname__}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                return compile_alone(self, signature)
        finally:
            compiling.is_inside = False

    Dispatcher.compile = compile_or_wait


def _seed_no_missing_device() -> None:
    """For each kind of device `torch.manual_seed` writes down the stack, in case one turns up: milliseconds each."""
    torch = sys.modules["torch"]
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None  # type: ignore[assignment]


def _keep_no_diary() -> None:
    """Torch describes all that it compiles to handlers of one logger, if it has any, and times its guards on a cold
    cache. pytest gives handlers to loggers that hand nothing on, so this one does.
    """
    logger = logging.getLogger("torch.__trace")
    logger.propagate = True
    logger.handlers.clear()
    importlib.import_module("torch._dynamo.guards").profile_guard_manager = lambda *_: 0.0


def _freeze() -> None:
    gc.collect()
    gc.freeze()
