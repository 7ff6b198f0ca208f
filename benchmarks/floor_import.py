"""The floor of an import: what Python takes to find, read and unmarshal the same modules.

Nothing is executed: no class is created, no function, no name is bound, no module object is made.
So it is below any correct code of as many modules, and says nothing about whether fewer would do:
`tests/repo/test_import_cost.py` holds their number and the size of their sources. Finders start
without what they have cached, as in a new process. Knows the names of modules; must not know kd.
"""

ROWS = {
    "import": ("import beyond torch, wall", "import beyond torch, CPU", "containers alone, CPU")
}

LISTING = """
import torch, sys
before = set(sys.modules)
import {names}
for name, module in sorted(sys.modules.items()):
    if name not in before and hasattr(getattr(module, "__loader__", None), "get_code"):
        print(name)
"""
"""Prints the modules that an import loads, each after the package that holds it."""

LOADING = """
import torch, sys, importlib.machinery
from time import perf_counter, process_time
names, folders, kept = {names!r}, {{}}, []
wall, cpu = perf_counter(), process_time()
for name in names:
    spec = importlib.machinery.PathFinder.find_spec(name, folders.get(name.rpartition(".")[0]))
    kept.append(spec.loader.get_code(name))
    folders[name] = spec.submodule_search_locations
wall, cpu = perf_counter() - wall, process_time() - cpu
print(wall * 1e3, cpu * 1e3)
"""
"""Prints the milliseconds that they take: by the clock, and of the processor."""
