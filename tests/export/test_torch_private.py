"""Each private name of torch exists and does what is asked of it; without it the rest works."""

from collections.abc import Callable

import pytest
import sympy
import torch
from tests import children
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from kd_export import _torch_private as private


def test_an_operator_is_told_from_a_function() -> None:
    assert isinstance(torch.ops.aten.relu.default, private.OpOverload)
    assert not isinstance(torch.relu, private.OpOverload)


def test_an_operator_that_calls_graphs_is_told_from_others() -> None:
    assert isinstance(torch.ops.higher_order.cond, private.HigherOrderOperator)
    assert not isinstance(torch.ops.aten.relu.default, private.HigherOrderOperator)


def test_assertions_are_operators() -> None:
    assert isinstance(private.ASSERT_METADATA, private.OpOverload)
    assert isinstance(private.ASSERT_SCALAR, private.OpOverload)


def test_the_tables_of_lines_are_an_option_where_there_are_some() -> None:
    from torch._inductor import config

    known = hasattr(config.aot_inductor, "enable_line_tables")
    assert private.without_line_tables() == (
        {"aot_inductor.enable_line_tables": False} if known else {}
    )


def test_the_leaves_of_arguments_are_those_of_torch() -> None:
    node = fx.Graph().placeholder("x")
    nested = (node, [1, None, (2.5,)], {"a": slice(0, 1), "b": []})
    assert private.tree_leaves(nested) == [node, 1, None, 2.5, slice(0, 1)]
    assert private.tree_leaves(None) == [None]


def test_limits_of_sizes_are_translated_to_sympy() -> None:
    from torch.utils._sympy.functions import Max, Min

    assert {Min: sympy.Min, Max: sympy.Max} == private.EXACT_LIMITS


def test_arguments_of_operators_have_names() -> None:
    assert private.argument_names(torch.ops.aten.relu.default) == ["self"]
    assert private.argument_names(torch.relu) == []


def test_the_ranges_of_sizes_are_set_and_an_example_is_put_back() -> None:
    program = torch.export.export(
        torch.nn.ReLU(), (torch.zeros(3, 2),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    node = next(node for node in program.graph.nodes if node.op == "placeholder")
    size = node.meta["val"].shape[0]
    assert isinstance(size, torch.SymInt)
    private.set_ranges(size, {size.node.expr: "set"})
    assert size.node.shape_env.var_to_range[size.node.expr] == "set"
    with private.without_example(program):
        assert program.example_inputs is None
    assert program.example_inputs is not None


def test_quick_functions_are_at_home_there() -> None:
    found = [[hasattr(home, name) for home in private.HOMES] for name in ("linear", "relu", "size")]
    assert found == [[True, False, False], [False, True, True], [False, False, True]]


def test_writes_are_seen_as_they_are_made() -> None:
    seen = []

    class Watch(private.TorchDispatchMode):
        def __torch_dispatch__(
            self,
            func: private.OpOverload,
            types: object,
            args: tuple[Tensor, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]  # by torch
        torch.zeros(2).add_(1)
    assert torch.ops.aten.add_.Tensor in seen


def test_hooks_of_buffers_are_those_of_torch() -> None:
    from torch.nn.modules.module import register_module_buffer_registration_hook

    before = set(private.BUFFER_HOOKS)
    handle = register_module_buffer_registration_hook(lambda *_: None)
    added = set(private.BUFFER_HOOKS) - before
    handle.remove()
    assert added == {handle.id}
    assert set(private.BUFFER_HOOKS) == before


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_layer_that_is_written_out_gives_what_the_layer_gives(name: str) -> None:
    torch.manual_seed(0)
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[name](3, 4).eval()
    x, state = torch.randn(5, 2, 3), torch.randn(1, 2, 4)
    states = (state, state) if name == "lstm" else state
    arguments = (x, states, layer._flat_weights, True, 1, 0.0, False, False, False)
    written = private.STEP_LAYERS[name]
    assert written is not None
    torch.testing.assert_close(written(*arguments)[0], layer(x, states)[0])


@pytest.mark.skipif(torch.__version__ < "2.11", reason="torch 2.10 has no loops")
def test_there_are_loops_over_time() -> None:
    assert None not in private.LOOP_LAYERS.values()


def test_a_block_is_seen_by_no_mode() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., object],
            types: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch(), private.without_modes():
        torch.relu(torch.zeros(1))
    with Watch():
        torch.tanh(torch.zeros(1))
    assert torch.tanh in seen
    assert torch.relu not in seen


def test_operators_of_users_are_listed_with_their_origin() -> None:
    @torch.library.custom_op("kd_private::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    library = torch.library.Library("kd_private", "FRAGMENT")
    library.define("thrice(Tensor x) -> Tensor")
    assert ("kd_private::twice", __name__) in set(private.decorated_operators())
    described = dict(private.library_operators())
    assert "test_torch_private" in described["kd_private::thrice"]


WITHOUT = """
import sys
import torch
import torch.export, torch.onnx  # torch itself needs the names that are taken away below
import torch._decomp.decompositions, torch._library.custom_ops, torch.utils._sympy.functions
gone = [
    ("torch._ops", "HigherOrderOperator"), ("torch.utils._sympy.functions", "Min"),
    ("torch.utils._sympy.functions", "Max"), ("torch.utils._python_dispatch", "TorchDispatchMode"),
    ("torch.nn.modules.module", "_global_buffer_registration_hooks"),
    ("torch._decomp.decompositions", "lstm_impl"), ("torch._decomp.decompositions", "gru_impl"),
    ("torch.export._patches", "lstm_while_loop_impl"),
    ("torch.export._patches", "gru_while_loop_impl"),
    ("torch._library.custom_ops", "OPDEFS"), ("torch.library", "_defs"),
    ("torch._C", "_nn"), ("torch._C", "_VariableFunctions"), ("torch._C", "_dispatch_dump"),
]
kept = [
    (sys.modules[module], name, getattr(sys.modules[module], name))
    for module, name in gone if hasattr(sys.modules.get(module), name)
]
for owner, name, _ in kept:
    delattr(owner, name)
from kd_export import _torch_private
for owner, name, value in kept:
    setattr(owner, name, value)
import kd_export
from kd_nn import TensorDictModule
assert set(_torch_private.STEP_LAYERS.values()) == {None}
module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
program = kd_export.export(module, {"x": torch.zeros(2, 3)})
assert program({"x": torch.zeros(5, 3)})["y"].shape == (5, 2)
"""


def test_a_torch_without_them_costs_features_and_not_the_import() -> None:
    children.check_output("-W", "ignore", "-c", WITHOUT)
