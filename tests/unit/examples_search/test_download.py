"""Split files are fetched, joined and unpacked, and what was interrupted goes on; the hub is a folder here."""

import gzip
import shutil
from pathlib import Path

import download as module
import pytest
from download import download, join, unpack


class Hub:
    """A hub of files in a folder; keeps what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, []
        folder.mkdir()
        (folder / "part_aa").write_bytes(bytes(range(256)) * 40)
        (folder / "part_ab").write_bytes(b"end of the index")
        (folder / "wiki-18.jsonl.gz").write_bytes(gzip.compress(b'{"contents": "a"}\n' * 1000))

    def __call__(self, repository: str, name: str, folder: Path) -> Path:
        self.asked.append((repository, name))
        return Path(shutil.copy2(self.folder / name, folder / name))


def test_parts_are_joined_in_their_order_and_the_corpus_unpacked(tmp_path):
    hub = Hub(tmp_path / "hub")
    index_path, corpus_path = download(tmp_path / "out", fetch=hub)
    assert index_path.read_bytes() == bytes(range(256)) * 40 + b"end of the index"
    assert corpus_path.read_text() == '{"contents": "a"}\n' * 1000
    assert hub.asked == [
        ("PeterJinGo/wiki-18-e5-index", "part_aa"),
        ("PeterJinGo/wiki-18-e5-index", "part_ab"),
        ("PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz"),
    ]
    assert not list((tmp_path / "out").glob("*.partial"))


def test_joining_goes_on_where_it_was(tmp_path, monkeypatch):
    parts = [tmp_path / name for name in ("a", "b", "c")]
    for part, content in zip(parts, (b"11111", b"222", b"33333333"), strict=True):
        part.write_bytes(content)
    (tmp_path / "joined.partial").write_bytes(b"1111122")  # inside the second part
    read = []
    monkeypatch.setattr(module, "_CHUNK_BYTES", 2)
    whole_open = Path.open

    def noting_open(self, mode="r", *args, **kwargs):
        if mode == "rb":
            read.append(self.name)
        return whole_open(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", noting_open)
    join(parts, tmp_path / "joined")
    join(parts, tmp_path / "joined")  # complete: nothing is read again
    assert read == ["b", "c"]
    assert (tmp_path / "joined").read_bytes() == b"1111122233333333"


def test_a_partial_file_of_other_parts_is_written_anew(tmp_path):
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "joined.partial").write_bytes(b"much longer than that")
    join([tmp_path / "a"], tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == b"12"


def test_a_damaged_corpus_is_named_and_leaves_no_file(tmp_path):
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(b"x" * 100_000)[:-20])
    with pytest.raises(ValueError, match=r"corpus.jsonl.gz is damaged .* remove it and run this again"):
        unpack(packed, tmp_path / "corpus.jsonl")
    assert not (tmp_path / "corpus.jsonl").exists()


def test_a_full_disk_is_found_before_joining(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"12345")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 8, 2))
    with pytest.raises(OSError, match=r"--save_dir .* needs 0.0 GB more"):
        join([tmp_path / "a"], tmp_path / "joined")


def test_a_file_that_is_not_split_needs_no_joining(tmp_path):
    hub = Hub(tmp_path / "hub")
    (hub.folder / "e5_Flat.index").write_bytes(b"whole")
    index_path, _ = download(tmp_path / "out", index_parts=["e5_Flat.index"], fetch=hub)
    assert index_path.read_bytes() == b"whole"
