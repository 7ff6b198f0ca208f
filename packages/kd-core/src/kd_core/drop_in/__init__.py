"""Run programs that import tensordict, on kd, as they are.

`python -m kd_core.drop_in PROGRAM` and `python -m kd_core.drop_in -m MODULE` run a program,
`install()` is for the top of one, and `pytest -p kd_core.drop_in` runs a suite.
"""

from kd_core.drop_in._finder import install as install
from kd_core.drop_in._finder import is_installed as is_installed
from kd_core.drop_in._finder import missing as missing
from kd_core.drop_in._finder import pytest_addoption as pytest_addoption
from kd_core.drop_in._finder import pytest_load_initial_conftests as pytest_load_initial_conftests
from kd_core.drop_in._finder import pytest_terminal_summary as pytest_terminal_summary
