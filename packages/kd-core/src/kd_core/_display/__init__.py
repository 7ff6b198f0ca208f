"""How a node is shown: printed, and in a notebook.

Knows entries and their order; must not know how a container stores them.
"""
