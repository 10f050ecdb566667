import sys

from lowtide import progress
from lowtide.progress import DelayedProgress


def pretend_a_terminal(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")


def test_nothing_is_shown_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    with DelayedProgress() as told:
        told("rotor", 0.5)
    assert capsys.readouterr() == ("", "")


def test_nothing_is_shown_of_what_is_quick(capsys, monkeypatch):
    pretend_a_terminal(monkeypatch)
    with DelayedProgress() as told:
        told("rotor", 0.5)
    assert capsys.readouterr() == ("", "")


def test_what_takes_long_is_shown_on_standard_error(capsys, monkeypatch):
    pretend_a_terminal(monkeypatch)
    with DelayedProgress() as told:
        told("rotor", 0.25)
        told._show()  # what the timer does when the time is up
        told("pofo", 0.75)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "rotor" in printed.err
    assert "pofo" in printed.err


def test_a_timer_that_comes_too_late_shows_nothing(capsys, monkeypatch):
    pretend_a_terminal(monkeypatch)
    with DelayedProgress() as told:
        pass
    told._show()
    assert capsys.readouterr() == ("", "")
