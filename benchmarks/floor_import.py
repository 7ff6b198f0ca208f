"""The floor of an import: the same modules, executed, at no cost of finding and reading files.

The bytecode of all modules lies in one piece in memory. The clock covers what no layout of the code
into files saves: unmarshalling it, making the modules and running them, which creates the same
classes and functions. It says nothing about whether less code would do. Knows the names of modules;
must not know kd.
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
import torch, gc, marshal, sys
from importlib.machinery import ModuleSpec, PathFinder
from time import perf_counter, process_time
found, codes = {{}}, {{}}
for name in {names!r}:
    parent = found.get(name.rpartition(".")[0])
    found[name] = PathFinder.find_spec(name, parent and parent.submodule_search_locations)
    codes[name] = found[name].loader.get_code(name)
stored = marshal.dumps({{name: code for name, code in codes.items() if code is not None}})
codes.clear()

class Stored:
    def find_spec(self, name, path=None, target=None):
        if name not in codes:
            return None
        spec = ModuleSpec(name, self, origin=found[name].origin)
        spec.submodule_search_locations = found[name].submodule_search_locations
        spec.has_location = True
        return spec
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(codes[module.__name__], module.__dict__)

sys.meta_path.insert(0, Stored())
gc.collect()
wall, cpu = perf_counter(), process_time()
codes.update(marshal.loads(stored))
import {imported}
wall, cpu = perf_counter() - wall, process_time() - cpu
print(wall * 1e3, cpu * 1e3)
"""
"""Prints the milliseconds that they take: by the clock, and of the processor."""
