"""Containers that tests share: one factory per kind, and a typed way to what is nested."""

from kd_core import NestedKey, TensorDictBase, is_tensor_collection


def inner(td: TensorDictBase, key: NestedKey) -> TensorDictBase:
    """Read a nested container; a key does not tell a type checker that it is one."""
    found: object = td.get(key)
    assert is_tensor_collection(found)
    return found
