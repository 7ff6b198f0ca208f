"""Formats of other libraries and of files, one a module: from and to nested dicts of entries.

Knows the formats and the primitives of a container; must not know operations or container kinds. A
module that needs an optional library is imported by the method that needs it.
"""
