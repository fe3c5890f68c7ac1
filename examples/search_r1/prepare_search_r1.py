"""Turn the public NQ/HotpotQA questions into prompt files in verl's columns.

Run: python examples/search_r1/prepare_search_r1.py --local_dir data/nq_hotpotqa
     python examples/search_r1/prepare_search_r1.py --hf_repo_id /path/with/train.parquet --local_dir data/nq_hotpotqa

``--hf_repo_id`` is a data set on the hub or a folder with ``train.parquet`` and ``test.parquet``. Written are the same
two names, with ``data_source`` tagged ``searchR1_``, instructions for a policy with the search tool, and the tools'
arguments per row; ``--hdfs_dir`` copies them on to any address fsspec knows. A split that is missing is skipped with a
warning; one that fails is reported, and the others are done.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rows import search_row, write_parquet

log = logging.getLogger("prepare_search_r1")

REPOSITORY = "PeterJinGo/nq_hotpotqa_train"
SPLITS = ("train", "test")
SYSTEM = "You are a helpful and harmless assistant."
INSTRUCTION = (
    "Answer the given question. Reason inside <think> and </think> first, every time you get new information. If you "
    "find that you lack some knowledge, call the search tool through <tool_call> and </tool_call>; it returns the top "
    "results between <tool_response> and </tool_response>. You may search as often as you want. When no further "
    "knowledge is needed, give the answer inside <answer> and </answer>, without explanations. For example, "
    "<answer> Beijing </answer>. Question: "
)


def prepare_row(row: Mapping[str, Any], index: int, split: str) -> dict[str, Any]:
    """Return one row in the columns of a prompt file.

    Args:
        row: With ``question``, ``data_source``, ``reward_model`` or ``golden_answers``.
        index: Number of the row.
        split: Its split.

    Raises:
        ValueError: If there is no question, or nothing to score an answer with.
    """
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"row {index}: column 'question' is missing or empty. Columns: {', '.join(row)}.")
    golden = row.get("golden_answers")
    answers = [] if golden is None else [golden] if isinstance(golden, str) else [str(answer) for answer in golden]
    reward_model = row.get("reward_model")
    if not answers and not (isinstance(reward_model, Mapping) and reward_model.get("ground_truth")):
        raise ValueError(f"row {index}: neither reward_model.ground_truth nor golden_answers holds an answer.")
    return search_row(
        data_source=str(row.get("data_source") or "unknown"),
        index=index,
        split=split,
        question=question,
        system=SYSTEM,
        user=INSTRUCTION + question,
        answers=answers,
        ability=str(row.get("ability") or ""),
        reward_model=reward_model if isinstance(reward_model, Mapping) else None,
        metadata=row.get("metadata"),
    )


def split_path(source: str, split: str) -> Path | None:
    """Return a split's Parquet file, in a folder or fetched from the hub; ``None`` where there is none."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        found = [*sorted(folder.glob(f"{split}.parquet")), *sorted(folder.glob(f"{split}-*.parquet"))]
        return found[0] if found else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id=source, filename=f"{split}.parquet", repo_type="dataset"))
    except EntryNotFoundError:
        return None


def prepare(source: str, local_dir: Path, hdfs_dir: str | None = None) -> list[Path]:
    """Write every split that is there; returns the written files.

    Args:
        source: Folder, or data set on the hub.
        local_dir: Folder to write; made when missing.
        hdfs_dir: Address to copy to.
    """
    import pyarrow.parquet

    local_dir.mkdir(parents=True, exist_ok=True)
    written = []
    for split in SPLITS:
        try:
            path = split_path(source, split)
            if path is None:
                log.warning("%s has no split %s: skipped.", source, split)
                continue
            # In batches: the training split has 170,000 rows.
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=4096)
            read = (row for batch in batches for row in batch.to_pylist())
            rows = [prepare_row(row, index, split) for index, row in enumerate(read)]
            write_parquet(local_dir / f"{split}.parquet", rows)
        except Exception as error:  # one split that fails must not cost the other
            log.error("Split %s of %s failed: %s: %s", split, source, type(error).__name__, error)
            continue
        log.info("%s: %d rows", local_dir / f"{split}.parquet", len(rows))
        written.append(local_dir / f"{split}.parquet")
    if not written:
        log.warning("Nothing was written: %s has none of the splits %s, or they failed.", source, ", ".join(SPLITS))
    if hdfs_dir is not None:
        copy_to(written, hdfs_dir)
    return written


def copy_to(paths: list[Path], address: str) -> None:
    """Copy files into a folder of any file system that fsspec knows (``hdfs://``, ``s3://``, a local path)."""
    import fsspec

    filesystem, folder = fsspec.core.url_to_fs(address)
    filesystem.makedirs(folder, exist_ok=True)
    for path in paths:
        filesystem.put_file(str(path), f"{folder.rstrip('/')}/{path.name}")
        log.info("copied to %s/%s", address.rstrip("/"), path.name)


def main() -> None:
    """Prepare; the exit status is 1 where nothing was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf_repo_id", default=REPOSITORY, help="data set on the hub, or a folder")
    parser.add_argument("--local_dir", type=Path, default=Path("data/searchR1_processed_direct"))
    parser.add_argument("--hdfs_dir", help="address to copy the files to, as fsspec takes it")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    raise SystemExit(0 if prepare(options.hf_repo_id, options.local_dir, options.hdfs_dir) else 1)


if __name__ == "__main__":
    main()
