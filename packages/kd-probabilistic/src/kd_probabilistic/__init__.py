"""Keyed modules that build distributions and draw from them."""

__version__ = "0.1.0"
