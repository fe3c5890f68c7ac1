"""Python files of the user, given by path: executed once per process, from whatever working folder.

Reward functions, agent loops and class tools may live in such a file. Whoever gives the path trusts the file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_user_file(path: Path) -> ModuleType:
    """Return the module of a Python file, executing it on the first call.

    Args:
        path: Absolute path.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    # The path is part of the module name: two files of the same name stay apart, and a second load finds the first.
    module_name = f"lit_rl_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # In sys.modules before execution: dataclasses and pickling look their module up there.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
