"""The scripts of examples/search_r1 import each other as a program in that folder does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "search_r1"))
