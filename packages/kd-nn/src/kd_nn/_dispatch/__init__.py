"""How a keyed module is called: signatures, binding, reading and writing entries.

Knows calls and entries; must not know plans or sequences.
"""
