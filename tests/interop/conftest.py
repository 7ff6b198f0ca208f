"""Modules that call the peer are collected where it is installed: in the lane `interop`."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("tensordict") else ["calls/comparing.py", "programs.py"]
