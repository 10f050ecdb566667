"""A small chain in a file, and files that are not there or garbled."""

import pytest

from lowtide import Chain, Stage


@pytest.fixture
def chain():
    stages = [Stage(f"s{k}", 0.1, 0.2, output_bytes=1000, saved_bytes=3000) for k in range(1, 5)]
    return Chain("four", stages, input_bytes=500)


@pytest.fixture
def files(tmp_path, chain):
    """Paths: `chain` holds the chain, `missing` nothing, `garbled` half a file, `schedule` is to be written."""
    paths = {name: str(tmp_path / f"{name}.json") for name in ("chain", "missing", "garbled", "schedule")}
    chain.save(paths["chain"])
    (tmp_path / "garbled.json").write_text('{"format": "lowtide.cha')
    return paths
