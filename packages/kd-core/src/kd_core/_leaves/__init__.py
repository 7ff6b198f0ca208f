"""Traversal of the leaves of a container: loops, foreach kernels, in-place writes, views.

Knows tensors and how entries nest; must not know any container kind.
"""
