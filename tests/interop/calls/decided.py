"""Which differences between both libraries are on purpose.

Knows the list of `kd_core`; must not know how calls are made or compared.
"""

import itertools
import tomllib
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Final

ROWS: Final[list[dict[str, object]]] = tomllib.loads(
    files("kd_core").joinpath("differences.toml").read_text(encoding="utf-8")
)["difference"]


def each(kind: str, methods: str, found: str) -> list[str]:
    """Return a pattern for each of several methods."""
    return [f"{kind} {method} {found}" for method in methods.split()]


OF_ROWS: Final[dict[str, list[str]]] = {
    "Reductions, `new_zeros`, `apply(batch_size=)`": [
        *each(
            "*", "all any amax amin logsumexp norm", "result: class 'NonTensor*' != 'TensorDict'"
        ),
        *each("worded", "cummax cummin max min", "result: length 3 != 1"),
        *each("worded", "cummax cummin", "result: class 'NonTensor*' != 'TensorDict'"),
        # New rows of words are an empty container there, or all are the first word.
        "* new_* result: class 'NonTensor*' != 'TensorDict'",
        *each("*", "new_*", "result: None != 'x0'"),
        *each("*", "new_*", "result: None != {}"),
        "row_values masked_select result: class 'NonTensorStack' != 'TensorDict'",
        # Words get lost where a function cannot be called with them.
        *each("worded", "*apply expand_as", "result: length 3 != 2"),
        "worded apply result: length 2 != 1",
        "row_values *apply result: ({'class': 'NonTensorStack',* != None",
        "row_values expand_as result: * != None",
        "worded flatten_keys result: length 3 != 1",
        *each("one_value", "__and__ __mod__", "result: * != None"),
        *each("row_values", "*apply(*batch_size=wrong)", "raises here"),
        "worded apply(*batch_size=wrong) raises here",
        "worded copy_at_(*fast=False) after: class 'NonTensorData' != 'NonTensorStack'",
        "worded update_at_(whole, none) after: class 'NonTensorData' != 'NonTensorStack'",
        *each("based", "__eq__ __ne__", "result: 'word' != *"),
        "based state_dict result: length 3 != 2",
        "worded state_dict result: 'word' != ('dict', [[]])",
        *each("*", "__or__ __xor__", "result: class 'NonTensor*' != '*TensorDict'"),
        *each("worded", "__eq__ __ne__", "result: class 'NonTensorData' != *"),
        *each("*_value*", "__eq__ __ne__", "result: 'object NotImplementedType' != *"),
        # A number takes the place of words, or nothing is written.
        "worded __setitem__ after: class 'NonTensorData' != 'NonTensorStack'",
        "one_value __setitem__ raises here",
        "worded copy_at_ after: 'x0' != 'x2'",
        "row_values __setitem__(first, new key) raises here",
    ],
    "Reductions, `new_zeros` and `pad` leave an": [
        "unbatched new_* result: * != 0.125",
        "unbatched new_* result: 'torch.* != 'torch.*",
        "unbatched new_* result: 'meta' != [[]0.125, *",
        *each(
            "unbatched",
            "max mean min nanmean nansum norm prod quantile std sum var amax amin",
            "result: length 0 != 1",
        ),
        *each(
            "unbatched",
            "max mean min nanmean nansum prod quantile std sum var amax amin",
            "result: 'Tensor' != 'UnbatchedTensor'",
        ),
        *each("unbatched", "mean nanmean nansum norm prod sum", "result: 'torch.* != 'torch.*"),
        *each(
            "unbatched",
            "max mean min nanmean nansum prod quantile std sum var amax amin logsumexp cummax "
            "cummin softmax all any __setitem__",
            "raises here",
        ),
        *each("unbatched", "all any quantile softmax __setitem__", "kind of error"),
        *each("unbatched", "addcdiv addcdiv_ addcmul addcmul_", "kind of error"),
        "unbatched state_dict result: 'Tensor' != 'UnbatchedTensor'",
        "unbatched named_apply(some, batch_size=*) result: length 1 != 2",
        # With a batch size a function is not called with it, and it keeps the batch size before.
        "unbatched *apply result: 0.25 != 0.125",
        "unbatched apply result: None != *",
        *each("unbatched", "pad", "result: 4 != 3"),
        *each("unbatched", "pad", "after: 4 != 3"),
        "unbatched auto_batch_size_ after: length * != 2",
    ],
    "`stack`, `cat` and `where` of `UnbatchedTensor`s": [
        *each("unbatched", "cat(*out=like) gather(*out=like)", "result: 'new' != '.u'"),
    ],
    "`prod(keepdim=True)` drops": ["worded tile result: length 3 != 0"],
    "`keys(True)` lists a nested container after": [
        *each("*", "keys valid_keys", "result: 'n' != ('tuple'*"),
    ],
    "Names and batch sizes that do not fit are dropped": [
        "* from_pytree result: batch length 1 != 0",
        # Comparisons, `amax`, `tile`, `expand_as` and others drop the names of dimensions.
        "named * result: names (*) != None",
        "named *apply(*names=none) result: names None != ('t', 'e')",
        "named to_lazystack result: names '?' != None",
        # `lazy_stack` drops the device.
        *each("*", "lazy_stack(*device='cpu')", "result: device 'cpu' != 'None'"),
        *each("*", "lazy_stack(*device=device(type='meta'))", "result: device 'meta' != 'None'"),
        *(f"{kind} rename*('x') raises here" for kind in ("unsized", "params")),
        *(f"{kind} rename*('x', 'y') raises here" for kind in ("unsized", "params")),
        "named masked_select after: names *",
    ],
    "An index by numbers or a mask, `repeat`, `repeat_interleave`": [
        *each("*", "__getitem__ __getitems__ cat", "result: 'new' != '.0.*'"),
        *each("[lr]a[zg][yg]*", "repeat_interleave", "result: 'new' != '.0.*'"),
        *each("lazy", "__getitem__(full) masked_select", "result: class 'TensorDict' != 'Lazy*'"),
    ],
    "`split_keys`, `get_at` and `narrow` of a lazy": [
        "lazy gather(*, ones, out=like) result: * != 0.0",
    ],
    "`NonTensorData.extend` is there and fails": [
        *each("one_value", "non_tensor_items fields", "result: length 1 != 3"),
        "one_value clear_refs_for_compile_ result: 'self' != *",
        *each("row_values", "set setdefault __setitem__((?n?,?*", "raises here"),
    ],
    "Where there are no tensors": [
        *each("empty", "bitwise_and logical_and __and__ mod __mod__", "result: * != None"),
        "empty quantile([[]0.25, 0.75]* result: batch *",
        *each("[lr]a[zg][yg]*", "split([[]9])", "raises here"),
        *each("row_values", "split(* *_(missing*", "raises here"),
        *each(
            "row_values", "*stack(*out=like) clamp(out=none) update_at_(whole?*dots)", "raises here"
        ),
        *each("row_values", "masked_select(wrong* repeat_interleave(*dim=5)", "raises here"),
        *each("*_value*", "clamp() expand(7,?7)", "raises here"),
        *each("row_values", "__[gl][et]__(column)", "result: batch length 2 != 3"),
        "row_values tile(* result: length 3 != 0",
    ],
    "`set_` of a nested key that is not there adds it": ["* set_ kind of error"],
    "`separates(key, strict=False)` adds a key": ["* split_keys kind of error"],
}
"""Further patterns of a row, by the beginning of what it says of tensordict."""


def _patterns_of(row: dict[str, object]) -> list[str]:
    given = row.get("calls", [])
    further = [OF_ROWS[start] for start in OF_ROWS if str(row["there"]).startswith(start)]
    return [*(given if isinstance(given, list) else ()), *itertools.chain(*further)]


PATTERNS: Final = [pattern for row in ROWS for pattern in _patterns_of(row)]


def pattern_for(kind: str, call: str, found: str) -> str | None:
    """Return the pattern of the list that allows a difference; `None` if it is not on purpose.

    A pattern names the method alone, or the call with what it is given: `norm(out=like)`.
    """
    told = [f"{kind} {each} {found}" for each in (call.partition("(")[0], call)]
    return next((each for each in PATTERNS if any(fnmatchcase(one, each) for one in told)), None)
