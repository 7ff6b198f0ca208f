"""The batch of a container: its size, device and lock, and arithmetic on shapes.

Knows sizes, devices and arguments; must not know containers, entries or leaves.
"""
