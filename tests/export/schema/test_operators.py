import re

import pytest
import torch

from kd_export import ExportError, UntrustedArtifact
from kd_export._backends.pt2 import check_registered
from kd_export._schema.operators import check_operator

PLAIN = [
    "torch.ops.aten.relu.default",
    "torch.ops.aten._softmax.default",
    "torch.ops.aten.__and__.Tensor",
    "torch.ops.aten.einsum.default",
    "torch.ops.higher_order.cond",
    "_operator.getitem",
    "torch.sym_max",
]


@pytest.mark.parametrize("target", PLAIN)
def test_operators_on_tensors_pass(target: str) -> None:
    check_registered([check_operator(target)])


HARMFUL = [
    "os.system",
    "torch.os.system",
    "torch.serialization.load",
    "builtins.eval",
    "_operator.call",
    "_operator.attrgetter",
    "torch.ops.load_library",
    "torch.ops.aten",
    "torch.ops.aten.from_file.default",
    "torch.ops.aten.from_file.out",
    "torch.ops.aten.save.default",
    "torch.ops.aten.save",
    "torch.ops.aten.__class__.mro",
    "torch.ops.aten.__loader__.load_module",
    "torch.ops.aten.relu.default.__call__",
    "torch.ops.aten._dir.append",
    "torch.ops.aten.relu._op",
    "torch.ops.aten.warn.default",
    "torch.ops.aten.manual_seed.default",
    "torch.ops.aten.wait.default",
    "torch.ops.aten.append.t",
    "torch.ops.aten.set_.source_Storage",
    "torch.ops.image.read_file.default",
    "torch.ops.image.write_file.default",
    "torch.ops.inductor._alloc_from_pool.default",
    "torch.ops.profiler._record_function_enter.default",
    "torch.ops.c10d.send.default",
    "torch.ops.prim.PythonOp.default",
    "torch.ops.higher_order.call_torchbind",
    "torch.ops.higher_order.triton_kernel_wrapper_functional",
    "torch.ops.higher_order.print",
    "torch.ops.higher_order.inductor_compiled_code",
]


@pytest.mark.parametrize("target", HARMFUL)
def test_what_reaches_beyond_tensors_is_refused(target: str) -> None:
    with pytest.raises(UntrustedArtifact, match="which is not an operator"):
        check_registered([check_operator(target)])


def test_an_operator_that_is_not_registered_says_what_to_import() -> None:
    with pytest.raises(ExportError, match=r"not registered\. Import the package that defines it"):
        check_registered(["torch.ops.torchvision.no_such_operator.default"])


# Operators of aten that take a string, each looked at: none of them uses it as a path or a command.
WITH_TEXT = """
_assert_async _assert_scalar _convolution_mode _functional_assert_async _functional_assert_scalar
_linalg_check_errors _linalg_eigh _linalg_svd _mixed_dtypes_linear _segment_reduce_backward
_sparse_mm _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward _sparse_semi_structured_linear
_sparse_semi_structured_tile conv1d conv2d conv3d div div_ divide divide_ einsum fft_fft fft_fft2
fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2 fft_ihfftn
fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn gelu gelu_ gelu_backward index_reduce
index_reduce_ linalg_cond linalg_eigh linalg_eigvalsh linalg_lstsq linalg_matrix_norm linalg_norm
linalg_qr linalg_svd linalg_svdvals meshgrid nanquantile pad pad_sequence quantile scatter scatter_
scatter_reduce scatter_reduce_ searchsorted segment_reduce stft
"""


# Overloads that take names of dimensions, which older versions of torch have. They are no paths.
WITH_DIMENSION_NAMES = re.compile(
    r"(align_to|refine_names|rename_?)\.\w+|"
    r"\w+\.((dim_)?[Dd]imname(List)?|((correction|generator_with|using)_)?names|named_out_dim)(_\w+)?"
)


def is_allowed(target: str) -> bool:
    try:
        check_registered([check_operator(target)])
    except ExportError:
        return False
    return True


def test_every_operator_that_takes_text_was_looked_at() -> None:
    """A new torch may bring another `from_file`: then this test says so."""
    takers = {
        f"{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}"
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and any("str" in str(a.type) for a in schema.arguments)
    }
    allowed = {taker for taker in takers if is_allowed(f"torch.ops.aten.{taker}")}
    unnamed = {taker for taker in allowed if not WITH_DIMENSION_NAMES.fullmatch(taker)}
    assert {taker.partition(".")[0] for taker in unnamed} <= set(WITH_TEXT.split())
