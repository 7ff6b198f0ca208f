"""The operations of a container: a concern a module.

Knows the primitives of a container; must not know container kinds. Functions of a concern may serve
those above it: the contract `core-ops` in `pyproject.toml` has their order, and most methods know
none of another concern (`core-concerns`).
"""
