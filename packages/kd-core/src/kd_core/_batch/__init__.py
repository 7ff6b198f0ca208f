"""What a batch is: sizes, device and lock, and arithmetic on shapes.

Knows sizes, devices and arguments; must not know containers, entries or leaves.
"""
