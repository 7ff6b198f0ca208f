"""Entries by key: reading, writing, moving and renaming them; what leaves hold it must not know."""
