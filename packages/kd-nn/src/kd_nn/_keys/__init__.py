"""Who reads and writes what: key specifications, the key graph, and drawings of it.

Knows keys; must not know modules or how they are called.
"""
