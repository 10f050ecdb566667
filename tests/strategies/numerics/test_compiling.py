import logging
import sys
import time

from lowtide.strategies.numerics import compiling
from lowtide.strategies.numerics.compiling import MESSAGE, Announcer, announce_compilation


def said(caplog):
    return [record.message for record in caplog.records]


def test_what_is_quick_is_not_mentioned(caplog):
    announcer = Announcer(patience_seconds=60.0)
    announcer.begin()
    announcer.end()
    assert said(caplog) == []


def test_what_takes_long_is_mentioned_once_also_while_it_lasts(caplog):
    announcer = Announcer(patience_seconds=0.0)
    for _ in range(3):
        announcer.begin()
        announcer.begin()  # a loop that it calls
        announcer.end()
        until = time.monotonic() + 10
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.001)
        announcer.end()
    assert said(caplog) == [MESSAGE]
    assert caplog.records[0].levelno == logging.WARNING


def test_numba_reports_what_it_compiles():
    import numba

    announce_compilation()
    announcer = compiling._announcer()
    seen = []

    def noted():
        seen.append(announcer._depth)
        Announcer.begin(announcer)

    announcer.begin = noted
    try:
        numba.njit(lambda value: value + 1)(1)
    finally:
        del announcer.begin
    assert seen
    assert announcer._depth == 0


def test_numba_is_not_imported_for_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    announce_compilation()
    assert "numba" not in sys.modules
