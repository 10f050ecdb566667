import os
from dataclasses import replace

import pytest

from lowtide import Chain, ChainError, LowtideError, Schedule, ScheduleError, Stage, simulate
from lowtide.errors import shown
from lowtide.files import check_can_write, write_text

CHAIN = Chain("net", [Stage("conv", 0.1, 0.2, 10, 30)])


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"format": "lowtide.chain/1", ', b"\xff\xfe\x00", b"[" * 100_000, b"NaN", b"1" * 10_000, b"null"],
)
def test_garbage_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "garbage.json"
    path.write_bytes(content)
    for record, error in ((Chain, ChainError), (Schedule, ScheduleError)):
        with pytest.raises(error) as caught:
            record.load(path)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)


def test_a_field_that_is_there_twice_is_not_guessed(tmp_path):
    path = tmp_path / "twice.json"
    CHAIN.save(path)
    path.write_text(path.read_text().replace('"output_bytes": 10', '"output_bytes": 10, "output_bytes": 11'))
    with pytest.raises(ChainError, match="'output_bytes' twice") as caught:
        Chain.load(path)
    assert str(caught.value).startswith(str(path))


def test_a_gigabyte_of_garbage_is_not_even_read(tmp_path):
    path = tmp_path / "huge.json"
    with path.open("wb") as stream:
        stream.truncate(2**30)  # a hole: takes no room
    with pytest.raises(ChainError, match="1073741824 bytes"):
        Chain.load(path)


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(ChainError, match="No such file"):
        Chain.load(tmp_path / "nothing.json")
    with pytest.raises(ChainError, match="cannot be read"):
        Chain.load(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "chain.json"
    CHAIN.save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    for moment in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, moment, full)
            with pytest.raises(LowtideError, match="No space left"):
                Chain("other", CHAIN.stages).save(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["chain.json"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "note.txt"
    write_text(path, "old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["note.txt"]


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for write in (CHAIN.save, check_can_write):
        with pytest.raises(LowtideError, match="a device or a pipe; name a file"):
            write(path)
    assert path.is_fifo()


def test_a_folder_is_not_written(tmp_path):
    with pytest.raises(LowtideError, match="it is a folder; name a file"):
        CHAIN.save(tmp_path)


def test_a_link_stays_one(tmp_path):
    (tmp_path / "there").mkdir()
    link, file = tmp_path / "link.json", tmp_path / "there" / "chain.json"
    link.symlink_to(file)
    for name in ("first", "second"):  # it points to nothing yet, then to a file
        replace(CHAIN, name=name).save(link)
        assert link.is_symlink()
        assert Chain.load(file).name == name
    assert sorted(each.name for each in (tmp_path / "there").iterdir()) == ["chain.json"]


def test_paths_that_the_system_refuses(tmp_path):
    (tmp_path / "round").symlink_to(tmp_path / "round")
    CHAIN.save(tmp_path / "chain.json")
    for path in (tmp_path / f"{'x' * 300}.json", tmp_path / "round"):
        for write in (CHAIN.save, lambda path: check_can_write(path, tmp_path / "chain.json")):
            with pytest.raises(LowtideError, match=r"cannot be written: (File name too|Too many).*; name another file"):
                write(path)
    check_can_write(tmp_path / "new.json", tmp_path / "round")  # whoever reads it refuses it


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(LowtideError, match=r"cannot be written: there is no folder .*no; make it first"):
        CHAIN.save(tmp_path / "no" / "chain.json")


def test_a_path_or_a_model_where_a_chain_is_expected():
    with pytest.raises(ChainError, match=r"not 'net\.json'; Chain\.load reads a file"):
        simulate("net.json", "schedule.json")
    with pytest.raises(ScheduleError, match=r"not 'schedule\.json'; Schedule\.load reads a file"):
        simulate(CHAIN, "schedule.json")
    assert shown(type("Model", (), {"__repr__": lambda self: "Model(\n  (0): Linear\n)"})()) == "Model( (0): Linear )"


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("gone")


def test_what_cannot_be_printed_is_named():
    assert shown(10**5000) == "a number of thousands of digits"
    assert shown(Unprintable()) == "an object of Unprintable"
