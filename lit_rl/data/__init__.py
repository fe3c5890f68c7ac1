"""Prompts: where they come from, in which order they are used, and how they become token ids."""
