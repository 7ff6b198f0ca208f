"""What a container kind must supply, and what a value must be to become an entry.

Knows the primitives and validation; must not know an operation or a container kind.
"""
