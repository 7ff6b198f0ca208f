"""Containers as bytes on their way to another process: one header, and few flat buffers.

Knows the nodes of `_kd_store`; must not know processes, operations or container kinds.
"""
