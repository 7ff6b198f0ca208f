"""Locks, and how `with` undoes an operation; what the operation does it must not know."""
