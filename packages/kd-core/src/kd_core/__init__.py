"""Keyed containers of tensors."""

__version__ = "0.1.0"
