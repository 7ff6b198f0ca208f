"""Containers as objects, arrays and files of others; how a format is laid out it must not know."""
