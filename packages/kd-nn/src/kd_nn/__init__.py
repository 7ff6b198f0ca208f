"""Keyed modules: `nn.Module`s that read and write (nested) keys of a container."""

__version__ = "0.1.0"
