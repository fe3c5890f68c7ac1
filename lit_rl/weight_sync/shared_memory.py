"""Weight buckets as files in shared memory, for replicas on the same host.

A file is written, its path is sent, every replica maps and loads it, and it is unlinked once all have acknowledged.
Names carry the run and the writer's process id, so that runs never meet and left-overs of dead processes can be told
from live ones.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil
from safetensors.torch import save_file
from torch import Tensor

_PREFIX = "lit_rl_weights"


class SharedMemoryBuckets:
    """Writes buckets and takes them away again."""

    def __init__(self, folder: Path | None = None) -> None:
        """Take a shared-memory folder and remove what dead processes left there.

        Args:
            folder: Where to write; the host's shared memory by default, the temporary folder where there is none.
        """
        shared = Path("/dev/shm")
        self.folder = folder or (shared if shared.is_dir() else Path(tempfile.gettempdir()))
        self._counter = 0
        self._paths: set[Path] = set()
        self.remove_leftovers()

    def write(self, tensors: list[tuple[str, Tensor]]) -> Path:
        """Write one bucket.

        Args:
            tensors: Names and contiguous CPU or GPU tensors.

        Returns:
            The file, readable by this user only.

        Raises:
            OSError: If the folder lacks the space; checked before a byte is written, since a full shared memory kills
                the writer.
        """
        num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes + (16 << 20):
            raise OSError(
                f"Weight sync: a bucket of {num_bytes / 1e6:.0f} MB does not fit into {self.folder} ({free / 1e6:.0f} MB free). "
                f"Lower data.serving.weight_bucket_mib, or give the machine more shared memory."
            )
        self._counter += 1
        path = self.folder / f"{_PREFIX}_{os.getpid()}_{id(self):x}_{self._counter}.safetensors"
        # Created empty with its final mode first: a save through a fresh file would be readable by others for a moment.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        self._paths.add(path)
        save_file({name: tensor.cpu() for name, tensor in tensors}, path)
        return path

    def release(self, path: Path) -> None:
        """Unlink a bucket that every replica has loaded."""
        path.unlink(missing_ok=True)
        self._paths.discard(path)

    def close(self) -> None:
        """Unlink whatever is still there; safe to call twice."""
        for path in list(self._paths):
            self.release(path)

    def remove_leftovers(self) -> int:
        """Unlink buckets whose writer is dead, and return how many there were."""
        count = 0
        for path in self.folder.glob(f"{_PREFIX}_*.safetensors"):
            pid = path.name.removeprefix(f"{_PREFIX}_").split("_")[0]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                path.unlink(missing_ok=True)
                count += 1
        return count
