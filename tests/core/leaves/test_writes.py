"""Writes into leaves: all of them or none, and overlapping memory."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from kd_core import InvalidArgument, InvalidValue, TensorDict

WRITES = {
    "index": lambda td, source: td.__setitem__(slice(None), source),
    "rows": lambda td, source: td.__setitem__([0, 1], source),
    "update_": lambda td, source: td.update_(source),
    "update_ of a mapping": lambda td, source: td.update_(source.to_dict()),
    "update inplace": lambda td, source: td.update(source, inplace=True),
    "copy_": lambda td, source: td.copy_(source),
    "apply_": lambda td, source: td.apply_(lambda _, new: new, source),
}


def ones(td: TensorDict) -> TensorDict:
    return td.apply(lambda leaf: torch.ones(leaf.shape))


def pair(second: Tensor) -> TensorDict:
    return TensorDict({"a": torch.zeros(2), "n": {"b": second}}, [2])


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_nothing_is_written_where_an_entry_is_expanded(write: object) -> None:
    td = pair(torch.zeros(1).expand(2))
    with pytest.raises(InvalidValue, match=r"entry `\('n', 'b'\)` .* share memory"):
        write(td, ones(td))  # type: ignore[operator]  # parametrised as `object`
    assert td["a"].tolist() == [0, 0]


class Deciding(Tensor):
    """A tensor whose class writes the first number of a copy, and then refuses 7."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # as torch documents
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.copy_ and 7 in args[1]:
                args[0][0] = 7
                raise LookupError("no 7")
            return func(*args, **(kwargs or {}))


class Refusing(Tensor):
    """The same below autograd, with an error of torch."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch documents

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]  # as torch documents
        with torch._C._DisableTorchDispatch():
            if func is torch.ops.aten.copy_.default and 7 in args[1]:
                args[0][0] = 7
                raise RuntimeError("no 7")
            return func(*args, **(kwargs or {}))


def written(leaf: Tensor) -> bool:
    return leaf.detach().as_subclass(Tensor).any().item() != 0


COPIES = {name: WRITES[name] for name in WRITES if name.startswith(("update", "copy_"))} | {
    "copy_ later": lambda td, source: td.copy_(source, non_blocking=True),
    "copy_ of a row": lambda td, source: td.copy_(source[0]),
}


@pytest.mark.parametrize("kind", [Deciding, Refusing])
@pytest.mark.parametrize("write", COPIES.values(), ids=COPIES)
def test_a_class_that_raises_while_it_is_copied_leaves_all_as_it_was(
    kind: type[Tensor], write: object
) -> None:
    leaves = [torch.zeros(2), *(torch.zeros(2).as_subclass(kind) for _ in range(2))]
    td = TensorDict({"a": leaves[0], "b": leaves[1], "n": {"c": leaves[2]}}, [2])
    source = TensorDict({"a": [1, 1], "b": [1, 1], "n": {"c": [7, 7]}}, [2])
    with pytest.raises((LookupError, RuntimeError), match="no 7"):
        write(td, source)  # type: ignore[operator]  # parametrised as `object`
    assert not any(map(written, leaves))


def test_a_single_leaf_whose_class_raises_is_as_it_was() -> None:
    leaf = torch.zeros(2).as_subclass(Deciding)
    with pytest.raises(LookupError, match="no 7"):
        TensorDict({"a": leaf}, [2]).set_("a", torch.tensor([7.0, 7.0]))
    assert not written(leaf)


@pytest.mark.parametrize(
    "change",
    [
        lambda td: td.add_(1),
        lambda td: td.mul_(td.clone()),
        lambda td: td.sub_(torch.ones(2)),
        lambda td: td.exp_(),
        lambda td: td.lerp_(td + 1, 0.5),
    ],
    ids=["number", "container", "tensor", "unary", "blend"],
)
def test_nothing_changes_in_place_where_an_entry_is_expanded(change: object) -> None:
    td = pair(torch.zeros(1).expand(2))
    with pytest.raises(InvalidValue, match=r"entry `\('n', 'b'\)` .* share memory"):
        change(td)  # type: ignore[operator]  # parametrised as `object`
    assert td["a"].tolist() == [0, 0]


def test_a_number_is_written_to_elements_in_one_place() -> None:
    td = pair(torch.ones(1).expand(2))
    assert td.fill_(3.0)["n", "b"].tolist() == [3, 3]
    assert td.zero_()["n", "b"].tolist() == [0, 0]


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_nothing_is_written_where_an_entry_is_a_parameter(write: object) -> None:
    td = pair(nn.Parameter(torch.zeros(2)))
    with pytest.raises(InvalidValue, match=r"entry `\('n', 'b'\)` .* requires grad"):
        write(td, ones(td))  # type: ignore[operator]  # parametrised as `object`
    assert td["a"].tolist() == [0, 0]


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_parameters_are_written_without_gradients(write: object) -> None:
    td = pair(nn.Parameter(torch.zeros(2)))
    with torch.no_grad():
        write(td, ones(td))  # type: ignore[operator]  # parametrised as `object`
    assert td["n", "b"].tolist() == [1, 1]


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_nothing_is_written_where_a_value_has_no_data(write: object) -> None:
    td = pair(torch.zeros(2))
    source = ones(td).set(("n", "b"), torch.ones(2, device="meta"))
    with pytest.raises(InvalidValue, match=r"entry `\('n', 'b'\)` .* `meta`"):
        write(td, source)  # type: ignore[operator]  # parametrised as `object`
    assert td["a"].tolist() == [0, 0]


def test_rows_that_overlap_are_read_before_they_are_written() -> None:
    td = TensorDict({"a": torch.arange(4.0), "b": torch.arange(4)}, [4])
    td[1:] = td[:-1]
    assert td["a"].tolist() == td["b"].tolist() == [0, 0, 1, 2]
    td[[1, 2, 3]] = td[:3]
    assert td["a"].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_an_entry_that_overlaps_its_value_takes_it_as_it_was(write: object) -> None:
    memory = torch.arange(3.0)
    td = TensorDict({"a": torch.zeros(2), "n": {"b": memory[1:]}}, [2])
    write(td, TensorDict({"a": torch.ones(2), "n": {"b": memory[:2]}}, [2]))  # type: ignore[operator]  # parametrised as `object`
    assert td["a"].tolist() == [1, 1]
    assert memory.tolist() == [0, 0, 1]


def test_a_single_write_that_torch_refuses_names_the_entry() -> None:
    td = TensorDict({"a": torch.zeros(1).expand(2)}, [2])
    with pytest.raises(InvalidValue, match="entry `a` cannot be written in place"):
        td[:] = 1.0
    with pytest.raises(InvalidValue, match="entry `a` cannot be written in place"):
        td.set_("a", torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("value", [1j, "x", None, float("nan")])
def test_a_value_without_a_place_in_the_dtype_names_the_entry(value: object) -> None:
    td = TensorDict({"a": torch.zeros(2), "n": torch.zeros(2, dtype=torch.int64)}, [2])
    with pytest.raises(InvalidArgument, match=r"cannot write .* whose dtype is torch"):
        td[0] = value
    assert td["a"].tolist() == [0, 0]


def test_a_string_is_not_written_in_place() -> None:
    with pytest.raises(InvalidArgument, match="cannot write 'x' of type `str` to `a`"):
        TensorDict({"a": torch.zeros(2)}, [2]).update_({"a": "x"})


@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta")
@pytest.mark.parametrize("name", ["update_", "copy_"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("shape", [(2, 2), (1, 2)])
def test_nothing_is_written_where_torch_refuses_a_sparse_value(
    name: str, layout: torch.layout, shape: tuple[int, ...]
) -> None:
    td = TensorDict({"a": torch.zeros(2), "b": torch.eye(2).to_sparse(layout=layout)})
    source = TensorDict({"a": torch.ones(2), "b": torch.ones(shape).to_sparse(layout=layout)})
    if layout is torch.sparse_coo and shape == (2, 2):  # its number of elements may change
        assert getattr(td, name)(source)["b"].to_dense().tolist() == [[1, 1], [1, 1]]
        return
    with pytest.raises(InvalidValue, match=r"entry `b` .*cannot be written in place"):
        getattr(td, name)(source)
    assert td["a"].tolist() == [0, 0]
    assert td["b"].to_dense().tolist() == [[1, 0], [0, 1]]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_nothing_is_written_where_torch_refuses_a_quantized_value() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}, [3])
    with pytest.raises(InvalidValue, match=r"entry `b` cannot be written in place: .*quantized"):
        td.update_({"a": torch.ones(3), "b": quantized})
    assert not td["a"].any()


def quantized(dtype: torch.dtype = torch.quint8) -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, dtype)


FLOAT4 = torch.float4_e2m1fn_x2
INT4 = torch.int4  # type: ignore[attr-defined]  # the stubs of torch lack it

REFUSED = {
    "quantized value": lambda: (torch.zeros(3), quantized()),
    "quantized leaf": lambda: (quantized(), torch.ones(3, dtype=torch.float64)),
    "another quantized dtype": lambda: (quantized(), quantized(torch.qint8)),
    "float4 value": lambda: (torch.zeros(3, dtype=torch.uint8), torch.empty(3, dtype=FLOAT4)),
    "float4 leaf": lambda: (torch.empty(3, dtype=FLOAT4), torch.ones(3)),
    "bits": lambda: (torch.empty(3, dtype=INT4), torch.empty(3, dtype=INT4)),
    "sparse value": lambda: (torch.zeros(3), torch.ones(3).to_sparse()),
    "sparse leaf": lambda: (torch.zeros(3).to_sparse(), torch.ones(3)),
    "no data": lambda: (torch.zeros(3), torch.ones(3, device="meta")),
    "expanded": lambda: (torch.zeros(1).expand(3), torch.ones(3)),
    "complex": lambda: (torch.zeros(3), torch.ones(3, dtype=torch.complex64)),  # a warning
}
OTHER_WRITES = {
    "update_at_": lambda td, source: td.update_at_(source, slice(None)),
    "set_at_": lambda td, source: td.set_at_("n", source["n"], slice(None)),
    "load_state_dict": lambda td, source: td.load_state_dict(source.state_dict(), assign=False),
    "copy_ later": lambda td, source: td.copy_(source, non_blocking=True),
    "cat": lambda td, source: torch.cat([source], 0, out=td),
    "stack": lambda td, source: torch.stack([source], 0, out=td[None]),
}


@pytest.fixture
def always_warns() -> Iterator[None]:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


def around(middle: Tensor, value: float) -> TensorDict:
    ends = [torch.full((3,), value) for _ in range(4)]
    names = TensorDict({"b": ends[1], "refused": middle, "c": ends[2]}, [3], names=["rows"])
    return TensorDict({"a": ends[0], "n": names, "z": ends[3]}, [3], names=["rows"])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse", "ignore:.*detach")
@pytest.mark.usefixtures("always_warns")
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize(
    "write", [*WRITES.values(), *OTHER_WRITES.values()], ids=[*WRITES, *OTHER_WRITES]
)
@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_a_write_that_fails_changes_nothing(refused: object, write: object, locked: bool) -> None:
    leaf, value = refused()  # type: ignore[operator]  # parametrised as `object`
    td, source = around(leaf, 0.0), around(value, 1.0)
    if locked:
        td.lock_()
    items = [(key, each, each._version) for key, each in td.items(True, True)]
    with pytest.raises((RuntimeError, UserWarning, InvalidArgument)):
        write(td, source)  # type: ignore[operator]  # as above
    now = [(key, each, each._version) for key, each in td.items(True, True)]
    assert all(
        mine[0] == was[0] and mine[1] is was[1] and mine[2] == was[2]
        for mine, was in zip(now, items, strict=True)
    )
    assert td.is_locked is locked
    assert td.names == ["rows"]
