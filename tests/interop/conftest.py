"""Modules that call the peer are collected where it is installed: in the lane `interop`."""

from importlib.util import find_spec

CALL_THE_PEER = ["calls/chains.py", "calls/comparing.py", "programs.py", "test_calls.py"]
collect_ignore = [] if find_spec("tensordict") else CALL_THE_PEER
