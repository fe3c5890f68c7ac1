"""Fetch a split index and a corpus from a model hub, join and unpack them; Search-R1's own by default.

Run: python examples/search_r1/download.py --save_dir data/wiki18

The default needs 70 GB for the downloads and 132 GB for the joined and unpacked files. Downloads resume where they
were (the hub client keeps partial files), and so does joining: a part counts as joined once all its bytes are in the
joined file. What is complete is not fetched again.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

INDEX_REPOSITORY, INDEX_PARTS = "PeterJinGo/wiki-18-e5-index", ("part_aa", "part_ab")
CORPUS_REPOSITORY, CORPUS_FILE = "PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz"
JOINED_INDEX = "e5_Flat.index"
_CHUNK_BYTES = 16 * 2**20

Fetch = Callable[[str, str, Path], Path]
"""Repository, file name and folder to the path of the fetched file."""


def fetch_from_hub(repository: str, name: str, folder: Path) -> Path:
    """Fetch one file of a data set from the hub, with progress; an interrupted download is continued."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo_id=repository, filename=name, repo_type="dataset", local_dir=str(folder)))


def join(parts: Sequence[Path], target: Path) -> None:
    """Write the parts one behind another into ``target``; goes on where an earlier call was interrupted.

    Args:
        parts: In their order.
        target: Complete once it has this name.
    """
    total = sum(part.stat().st_size for part in parts)
    if target.exists() and target.stat().st_size == total:
        return
    _check_space(target, total)
    aside = target.with_name(target.name + ".partial")
    done = aside.stat().st_size if aside.exists() else 0
    with aside.open("r+b" if done else "wb") as out, _bar(total, done, f"joining {target.name}") as bar:
        # A partial file that is too long is of other parts.
        done = 0 if done > total else done
        out.truncate(done)
        out.seek(done)
        start = 0
        for part in parts:
            size = part.stat().st_size
            if start + size > done:
                with part.open("rb") as file:
                    file.seek(max(0, done - start))
                    while chunk := file.read(_CHUNK_BYTES):
                        out.write(chunk)
                        bar.update(len(chunk))
            start += size
        out.flush()
        os.fsync(out.fileno())
    aside.replace(target)


def unpack(packed: Path, target: Path) -> None:
    """Write the content of a gzip file; an interrupted call starts anew.

    Raises:
        ValueError: If the file is damaged.
    """
    if target.exists() and target.stat().st_mtime >= packed.stat().st_mtime:
        return
    aside = target.with_name(target.name + ".partial")
    try:
        with packed.open("rb") as raw, gzip.open(raw) as file, aside.open("wb") as out:
            with _bar(packed.stat().st_size, 0, f"unpacking {target.name}") as bar:
                while chunk := file.read(_CHUNK_BYTES):
                    out.write(chunk)
                    bar.update(raw.tell() - bar.n)
    except (EOFError, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise
        raise ValueError(f"{packed} is damaged ({error}): remove it and run this again.") from error
    aside.replace(target)


def download(
    save_dir: Path,
    *,
    index_repository: str = INDEX_REPOSITORY,
    index_parts: Sequence[str] = INDEX_PARTS,
    corpus_repository: str = CORPUS_REPOSITORY,
    corpus_file: str = CORPUS_FILE,
    fetch: Fetch = fetch_from_hub,
) -> tuple[Path, Path]:
    """Fetch, join and unpack; returns the paths of index and corpus.

    Args:
        save_dir: Folder; made when missing.
        index_repository: Data set with the index; empty to leave it out.
        index_parts: Its files, in their order.
        corpus_repository: Data set with the corpus.
        corpus_file: Its file, packed (``.gz``) or not.
        fetch: Fetches one file.
    """
    save_dir.mkdir(parents=True, exist_ok=True)
    index_path, corpus_path = save_dir / JOINED_INDEX, save_dir / corpus_file.removesuffix(".gz")
    if index_repository:
        parts = [fetch(index_repository, name, save_dir) for name in index_parts]
        if parts != [index_path]:
            join(parts, index_path)
    fetched = fetch(corpus_repository, corpus_file, save_dir)
    if corpus_file.endswith(".gz"):
        unpack(fetched, corpus_path)
    return index_path, corpus_path


def _check_space(target: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    aside = target.with_name(target.name + ".partial")
    needed = num_bytes - (aside.stat().st_size if aside.exists() else 0)
    if needed > free:
        raise OSError(
            f"--save_dir {target.parent}: {target.name} needs {needed / 1e9:.1f} GB more, {free / 1e9:.1f} GB are "
            "free. Free some, or give another folder."
        )


def _bar(total: int, initial: int, what: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, initial=initial, desc=what, unit="B", unit_scale=True, disable=None, file=sys.stderr)


def main() -> None:
    """Fetch everything and say where it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save_dir", type=Path, required=True)
    parser.add_argument("--index_repository", default=INDEX_REPOSITORY, help="data set; empty for the corpus alone")
    parser.add_argument("--index_parts", nargs="+", default=list(INDEX_PARTS), help="its files, in their order")
    parser.add_argument("--corpus_repository", default=CORPUS_REPOSITORY)
    parser.add_argument("--corpus_file", default=CORPUS_FILE)
    options = parser.parse_args()
    try:
        index_path, corpus_path = download(
            options.save_dir,
            index_repository=options.index_repository,
            index_parts=options.index_parts,
            corpus_repository=options.corpus_repository,
            corpus_file=options.corpus_file,
        )
    except (OSError, ValueError, ModuleNotFoundError) as error:
        raise SystemExit(f"download: error: {error}") from error
    print(f"--index_path {index_path} --corpus_path {corpus_path}")


if __name__ == "__main__":
    main()
