"""For every test: property tests have no deadline, since the machines that run them are shared and slow at times."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("lit_rl", deadline=None)
settings.load_profile("lit_rl")
