"""Options of modules in pairs, and random chains of modules, through both libraries.

    python -m tests.interop.calls.chains [--chains 300] [--first 0] [--list 40]

Each program is Python text: how a module is made, and one call of it. Knows how programs are made
and run; must not know how a result is described.
"""

import argparse
import collections
import copy
import inspect
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any, Final, NamedTuple

import tensordict
import tensordict.nn
import torch
from tests.interop.calls.outcomes import difference, outcome
from tests.interop.calls.subjects import Library
from torch import nn
from torch.distributions import Categorical, Normal

import kd_core
import kd_nn
import kd_probabilistic

OURS = Library("kd", kd_core, kd_nn, kd_probabilistic)
PEER = Library("peer", tensordict, tensordict.nn)


class Tried(NamedTuple):
    """A program, and what differs between both libraries; `None` if nothing does.

    Attributes:
        made: How the module is made.
        call: What is called.
        found: What differs.
        ours: What comes here, and `theirs` there.
        facts: What `facts` says of the module.
    """

    made: str
    call: str
    found: str | None
    ours: str
    theirs: str
    facts: str = ""


def plus(x: torch.Tensor, h: torch.Tensor | None = None, *, k: float = 1.0) -> torch.Tensor:
    return x * k if h is None else x + h


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x.abs() + 1


class Net(nn.Module):
    """A module with a method beside `forward`, and an argument that nobody needs to give."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((), 2.0))

    def forward(self, x: torch.Tensor, noise: float = 0.0) -> torch.Tensor:
        return x * self.w + noise

    def other(self, x: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
        return x * scale


class Layers(nn.Module):
    """A module with a parameter, a buffer and a sub-module."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), 2.0))
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x) * self.w + self.mean
        return made


class Installing:
    """A module, and values that `to_module` installs in it."""

    def __init__(self, values: Any, module: nn.Module, dest: bool = False, **options: Any) -> None:
        self.values, self.module, self.options = values, module, options
        self.before = dict(self.tensors())
        if dest:
            self.options["swap_dest"] = values.clone().data.zero_()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, module in self.module.named_modules():
            for name, value in {**module._parameters, **module._buffers, **vars(module)}.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}", value

    def state(self) -> Any:
        """Return what the tensors of the module are, and which of them it or the values had."""
        mine = {id(value): name for name, value in self.before.items()}
        given = {id(value): str(name) for name, value in self.values.items(True, True)}
        mapped = {value.data_ptr(): str(name) for name, value in self.values.items(True, True)}
        return [
            (name, type(value).__name__, value.tolist(), value.requires_grad,
             mine.get(id(value)), given.get(id(value)), mapped.get(value.data_ptr()))
            for name, value in sorted(self.tensors())
        ], sorted(self.module.state_dict()), [name for name, _ in self.module.named_parameters()]  # fmt: skip

    def kept(self) -> Any:
        self.values.to_module(self.module, **self.options)
        return self.state()

    def during(self) -> Any:
        with self.values.to_module(self.module, **self.options):
            return self.state(), self.module(torch.ones(2))

    def after(self) -> Any:
        with self.values.to_module(self.module, **self.options):
            pass
        return self.state()

    def failed(self) -> Any:
        try:
            with self.values.to_module(self.module, **self.options):
                raise ArithmeticError
        except ArithmeticError:
            return self.state()

    def twice(self) -> Any:
        with self.values.to_module(self.module, **self.options):
            with self.values.apply(lambda x: x + 1).to_module(self.module, **self.options):
                inside = self.state()
            return inside, self.state()

    def returned(self) -> Any:
        found = self.values.to_module(self.module, **self.options)
        if found is None:
            return None
        before = {id(value): name for name, value in self.before.items()}
        return [
            (str(name), type(value).__name__, value.tolist(), before.get(id(value)))
            for name, value in sorted(found.items(True, True), key=lambda item: str(item[0]))
        ]

    def swapped(self) -> Any:
        found = self.values.to_module(self.module, **self.options)
        return found is self.options.get("swap_dest"), found is self.values

    def learned(self) -> Any:
        with self.values.to_module(self.module, **self.options):
            self.module(torch.ones(2)).sum().backward()
        grads = [(str(name), x.grad) for name, x in sorted(self.values.items(True, True), key=str)]
        return grads, [(name, value.grad) for name, value in sorted(self.tensors())]


NAMES: Final = (
    *("TensorDict", "TensorDictModule", "TensorDictSequential", "ProbabilisticTensorDictModule"),
    *("ProbabilisticTensorDictSequential", "EnsembleModule", "WrapModule", "InteractionType"),
    *("TensorDictModuleWrapper", "TensorDictModuleBase", "TensorDictParams", "dispatch"),
    *("CompositeDistribution", "set_interaction_type", "set_skip_existing", "lazy_stack"),
    "set_composite_lp_aggregate",
)


def _scope(lib: Library) -> dict[str, Any]:
    names = {name: getattr(lib, name) for name in NAMES}
    own: dict[str, Any] = {
        "Layers": Layers,
        "Installing": Installing,
        "plus": plus,
        "both": both,
        "Net": Net,
        "torch": torch,
        "nn": nn,
    }
    names |= own | {"Normal": Normal, "Categorical": Categorical}

    class Dispatched(nn.Module):
        in_keys = ["x", ("n", "h")]  # noqa: RUF012  # as users write it
        out_keys = ["y"]  # noqa: RUF012  # as users write it

        @lib.dispatch  # type: ignore[untyped-decorator]  # chosen at run time
        def forward(self, tensordict: Any) -> Any:
            return tensordict.set("y", tensordict["x"] + tensordict["n", "h"])

        @lib.dispatch(separator="/", source=["x"], dest="out_keys", auto_batch_size=False)  # type: ignore[untyped-decorator]  # chosen at run time
        def other(self, tensordict: Any) -> Any:
            return tensordict.set("y", tensordict["x"] * 2)

    class Based(lib.TensorDictModuleBase):  # type: ignore[name-defined,misc]  # chosen at run time
        in_keys = ["x"]  # noqa: RUF012  # as users write it
        out_keys = ["y", ("n", "z")]  # noqa: RUF012  # as users write it

        @lib.dispatch  # type: ignore[untyped-decorator]  # chosen at run time
        def forward(self, tensordict: Any, k: float = 1.0) -> Any:
            tensordict["y"] = tensordict["x"] * k
            return tensordict.set(("n", "z"), tensordict["x"])

    def skipping(module: Any, td: Any) -> Any:
        with lib.set_skip_existing(True):
            return module(td.set("y", td["x"]))

    def drawing(kind: Any, module: Any, td: Any) -> Any:
        with lib.set_interaction_type(kind):
            return module(td)

    def summed(module: Any, td: Any) -> Any:
        with lib.set_composite_lp_aggregate(True):
            return module(td)

    made = {"Dispatched": Dispatched, "Based": Based, "skipping": skipping}

    def vmapped(module: Any, td: Any) -> Any:
        return torch.vmap(lambda td: module(td))(td)

    def functional(module: Any, td: Any) -> Any:
        params = lib.TensorDict.from_module(module).data.clone() * 3
        with params.to_module(module):
            return module(td)

    def hooked(module: Any, td: Any) -> Any:
        seen: list[Any] = []
        module.register_forward_pre_hook(lambda m, args: seen.append([*args[0].keys()]))
        module.register_forward_hook(lambda m, args, out: out.clone().set("hook", out["x"]))
        return module(td), seen

    def without_grad(module: Any, td: Any) -> Any:
        with torch.no_grad():
            return module(td)

    def reloaded(module: Any, td: Any) -> Any:
        state = {name: value * 2 for name, value in module.state_dict().items()}
        return str(module.load_state_dict(state)), sorted(state), module(td)

    def rebound(module: Any, **attributes: Any) -> Any:
        for name, value in attributes.items():
            setattr(module, name, value)
        return module

    more: dict[str, Any] = {
        "vmapped": vmapped,
        "functional": functional,
        "hooked": hooked,
        "reloaded": reloaded,
    }
    more |= {"without_grad": without_grad, "rebound": rebound, "deepcopy": copy.deepcopy}
    return names | made | more | {"drawing": drawing, "summed": summed}


SCOPES: Final = {lib: _scope(lib) for lib in (OURS, PEER)}
INPUT: Final = (
    "TensorDict({'x': torch.tensor([1.0, -2.0]), 'n': {'h': torch.ones(2)}, 'kept': torch.ones(2)},"
    " [2])"
)
DRAWN: Final = (
    "TensorDict({'loc': torch.tensor([1.0, -2.0]), 'scale': torch.ones(2), "
    "'p': {'l': torch.zeros(2)}}, [2])"
)


INSTEAD: Final = {
    "m.select_out_keys(*m.out_keys[:1]).reset_out_keys()(td)": "m(td)",
    "m.select_out_keys(*m.out_keys[-1:]).reset_out_keys().out_keys": "m.out_keys",
}
"""What is run there in place of a call: a module that is reset is as before, but not there."""


def tried(made: str, call: str) -> Tried:
    """Return what a call of a module does in both libraries."""
    if call in INSTEAD and "selected_out_keys" in made:
        return Tried(made, call, None, "", "")  # it is not as before
    seen: list[dict[str, Any]] = []
    found_facts = ""
    for lib in (OURS, PEER):
        torch.manual_seed(0)
        names = {**SCOPES[lib]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = made.startswith("ProbabilisticTensorDictModule")
            names["td"] = eval(DRAWN if drawn else INPUT, names)  # our own text, as below
            try:
                names["m"] = eval(made, names)
            except Exception as error:
                families = tuple(cls.__name__ for cls in type(error).__mro__[:-2])
                seen.append({"error": families, "text": f"made {type(error).__name__}: {error}"})
                continue
            torch.manual_seed(1)
            text = (
                INSTEAD.get(call, call)
                if lib is PEER and hasattr(names["m"], "select_out_keys")
                else call
            )
            seen.append(outcome(lambda: eval(text, names), names["td"], lib))  # noqa: B023  # now
            found_facts = facts(names["m"]) if lib is OURS else found_facts
    ours, theirs = seen
    if str(theirs.get("text")).startswith("made"):
        return Tried(made, call, None, "", "")
    if str(ours.get("text")).startswith("made") and not runs(names, lib):
        return Tried(made, call, None, "", "")  # it is refused before the first call here
    found = difference(ours, theirs)
    if found == "raises here":
        found += f": {str(ours['text']).partition(': ')[0]}"
    told = [str(each.get("text", each.get("result")))[:400] for each in seen]
    if found and found.startswith(("after", "moved")):
        told = [str(each.get("after"))[:400] for each in seen]
    return Tried(made, call, found, told[0], told[1], found_facts)


def facts(module: Any) -> str:
    """Return what a module does on which decisions depend.

    It is `hides` where a part hides an output at a key of the input, or of what another part reads;
    and `idle` where a sequence inside has no outputs.
    """
    parts = [part for part in getattr(module, "modules", tuple)() if hasattr(part, "out_keys")]
    read = {"x", "n", ("n", "h"), "kept", *(key for part in parts for key in part.in_keys)}
    source = ((getattr(part, "out_keys_source", ()), part.out_keys) for part in parts)
    hides = any(key not in shown and key in read for keys, shown in source for key in keys)
    idle = any(hasattr(part, "select_subsequence") and not part.out_keys for part in parts)
    return " ".join(word for word, holds in (("hides", hides), ("idle", idle)) if holds)


def runs(names: dict[str, Any], lib: Library) -> bool:
    """Return whether a module can be called at all."""
    return "error" not in outcome(lambda: names["m"](names["td"]), names["td"], lib)


CALLS: Final = (
    *("m(td)", "m(td, tensordict_out=TensorDict({}, [2]))", "m(x=td['x'])", "m(td['x'])"),
    *("m(td['x'], td['n', 'h'])", "m(tensordict=td)", "m(td.lock_())", "m(td, k=3.0)"),
    *("m(lazy_stack([td, td.clone()]))", "[m.in_keys, m.out_keys]", "m(td.exclude('x'))"),
    *(
        "m.select_out_keys(m.out_keys[-1])(td)",
        "m.reset_out_keys().out_keys",
        "[m(td), m(td)]",
        "m.reset_parameters_recursive()",
    ),
    *INSTEAD,
    "skipping(m, td)",
    "dict(m.state_dict()).keys()",
    *("vmapped(m, td)", "functional(m, td)", "hooked(m, td)", "without_grad(m, td)"),
    *("reloaded(m, td)", "deepcopy(m)(td)", "m.eval()(td)", "[*map(str, m.named_parameters())]"),
    *("rebound(m, inplace=False)(td)", "m(td[0])", "m(td.to_lazystack(0))", "m(td.clone()), m(td)"),
)
DRAWS: Final = (
    *("m(td).keys()", "m(td)", "m.get_dist(td).mean", "m.get_dist_params(td)", "m.out_keys"),
    *("m.log_prob(m(td))", "m(td, requires_grad=False)", "m.log_prob_key", "m.log_prob_keys"),
    *("m.default_interaction_type", "m.log_prob(td.set('a', torch.zeros(2)))"),
    "m(td, tensordict_out=TensorDict({}, [2]))",
    "m.dist_sample_keys", "m.dist_params_keys", "m.build_dist_from_params(td).mean",
    "drawing(InteractionType.RANDOM, m, td)", "drawing('mean', m, td)", "summed(m, td)",
    "m(td, None)", "type(m.get_dist(td)).__name__", "m.select_out_keys('a')(td)",
)  # fmt: skip
PARTS: Final = (
    *("m[:1](td)", "len(m)", "m[0](td)", "m.select_subsequence(out_keys=['z'])(td)"),
    *("m.select_subsequence(in_keys=['x'])(td)", "m.select_subsequence(out_keys=['y']).in_keys"),
    "m.compute_tree() if hasattr(m, 'compute_tree') else None",
)
OPTIONS: Final[dict[str, tuple[str, tuple[str, ...], dict[str, tuple[str, ...]]]]] = {
    "step": (
        "TensorDictModule({module}, in_keys={in_keys}, out_keys={out_keys}{more})",
        (*CALLS, "m({'x': td['x'], 'n': {'h': td['n', 'h']}})"),
        {
            "module": ("plus", "Net()", "both", "lambda x: {'y': x}", "nn.Identity()", "torch.add",
                       "lambda x: TensorDict({'q': x}, [2])", "lambda *xs: xs[0]"),
            "in_keys": ("['x']", "'x'", "['x', ('n', 'h')]", "['x', 'lacking']", "{'x': 'x'}", "[]",
                        "{'x': 'x', ('n', 'h'): 'h'}", "{'x': 'x', 'lacking': 'h'}"),
            "out_keys": ("['y']", "'y'", "['y', 'z']", "['_']", "['_', ('n', 'z')]", "['x']", "[]"),
            "inplace": ("False", "'empty'", "None"),
            "method": ("'other'",),
            "method_kwargs": ("{'scale': 2.0}",),
            "strict": ("True",),
            "out_to_in_map": ("True", "False"),
            "get_kwargs": ("{'default': None}",),
        },
    ),
    "sequence": (
        "TensorDictSequential({first}, {second}{more})",
        (*CALLS, *PARTS),
        {
            "first": ("TensorDictModule(plus, ['x'], ['y'])", "Based()", "lambda td: td.set('y', td['x'])",
                      "TensorDictModule(both, ['x'], ['y', ('n', 'q')], inplace=False)",
                      "TensorDictModule(plus, ['x', 'lacking'], ['y'])",
                      "TensorDictModule(plus, ['lacking'], ['y'])",
                      "WrapModule(lambda td: td.set('y', td['x']), in_keys=['x'], out_keys=['y'])",
                      "WrapModule(lambda td: td.select('x').set('y', td['x']))",
                      "TensorDictSequential(TensorDictModule(Net(), ['x'], ['y']))"),
            "second": ("TensorDictModule(Net(), ['y'], ['z'])", "TensorDictModule(Net(), ['y'], ['x'])",
                       "TensorDictModule(plus, {'y': 'x', 'kept': 'h'}, ['z'], inplace='empty')",
                       "TensorDictModuleWrapper(TensorDictModule(torch.neg, ['y'], ['z']))",
                       "lambda td: TensorDict({'z': td['y']}, td.batch_size)"),
            "partial_tolerant": ("True",),
            "selected_out_keys": ("['z']", "['y']", "[('n', 'q')]", "[]"),
            "inplace": ("False", "'empty'", "True"),
        },
    ),
    "draw": (
        "ProbabilisticTensorDictModule({in_keys}, {out_keys}, distribution_class={cls}{more})",
        DRAWS,
        {
            "in_keys": ("['loc', 'scale']", "{'loc': 'loc', 'scale': 'scale'}", "{'loc': ('p', 'l'), 'scale': 'scale'}", "['loc']"),
            "out_keys": ("['a']", "'a'", "[('n', 'a')]", "None"),
            "cls": ("Normal", "torch.distributions.Laplace"),
            "default_interaction_type": ("InteractionType.RANDOM", "InteractionType.MEAN", "InteractionType.MODE",
                                         "InteractionType.DETERMINISTIC", "InteractionType.MEDIAN", "'random'"),
            "return_log_prob": ("True",),
            "log_prob_key": ("'lp'", "('n', 'lp')"),
            "log_prob_keys": ("['lp']",),
            "cache_dist": ("True",),
            "num_samples": ("2", "torch.Size([2])", "()"),
            "n_empirical_estimate": ("2",),
            "distribution_kwargs": ("{'scale': torch.ones(2)}", "{'validate_args': False}"),
            "generator": ("3",),
        },
    ),
    "policy": (
        "ProbabilisticTensorDictSequential({first}, {last}{more})",
        (*DRAWS, "m(x=td['x'])", "m(td['x'])", *PARTS[:2], "m.select_subsequence(out_keys=['loc'])(td)",
         "m.get_dist(td, tensordict_out=TensorDict({}, [2])).mean", "m[-1](m[0](td))", "m.requires_sample",
         "m(td.lock_())", "m(lazy_stack([td, td.clone()])).batch_size"),
        {
            "first": ("TensorDictModule(both, ['x'], ['loc', 'scale'])",
                      "TensorDictModule(both, ['x'], ['loc', 'scale'], inplace=False)",
                      "TensorDictSequential(TensorDictModule(Net(), ['x'], ['y']), TensorDictModule(both, ['y'], ['loc', 'scale']))",
                      "lambda td: td.set('loc', td['x']).set('scale', td['x'].exp())"),
            "last": ("ProbabilisticTensorDictModule(['loc', 'scale'], ['a'], distribution_class=Normal)",
                     "ProbabilisticTensorDictModule(['loc', 'scale'], ['a'], distribution_class=Normal, return_log_prob=True,"
                     " default_interaction_type=InteractionType.RANDOM)",
                     "ProbabilisticTensorDictModule({'logits': 'scale'}, ['a'], distribution_class=Categorical, return_log_prob=True)",
                     "ProbabilisticTensorDictModule(['loc', 'scale'], ['a'], distribution_class=Normal), "
                     "TensorDictModule(plus, ['a'], ['z'])",
                     "TensorDictModule(plus, ['loc'], ['z'])"),
            "partial_tolerant": ("True",),
            "return_composite": ("True", "False"),
            "selected_out_keys": ("['a']", "['loc']"),
            "inplace": ("False", "True", "'empty'"),
        },
    ),
    "ensemble": (
        "EnsembleModule({module}, {copies}{more})",
        ("m(td)", "m(td.expand(2, 2))", "[m.in_keys, m.out_keys]", "m.num_copies", "sorted(m.state_dict())",
         "m(x=td['x'])", "m.select_out_keys('y')(td)", "m.reset_parameters_recursive() is None", "m(td).batch_size"),
        {
            "module": ("TensorDictModule(Net(), ['x'], ['y'])", "TensorDictModule(nn.Linear(2, 3), ['x'], ['y'])",
                       "TensorDictSequential(TensorDictModule(Net(), ['x'], ['y']), TensorDictModule(Net(), ['y'], ['z']))"),
            "copies": ("2", "1"),
            "expand_input": ("False", "True"),
        },
    ),
    "wrap": (
        "WrapModule({func}{more})",
        CALLS,
        {
            "func": ("lambda td: td.set('y', td['x'])", "lambda td: td * 2", "lambda td: td.select('x')",
                     "lambda td: TensorDict({'y': td['x']}, td.batch_size)"),
            "inplace": ("True", "False"),
            "in_keys": ("['x']", "'x'"),
            "out_keys": ("['y']",),
        },
    ),
    "own": (
        "{made}",
        (*CALLS, "m.other(td)", "m.other(td['x'])", "m.other(x=td['x'])", "m(td['x'], td['x'])", "m(x=td['x'], n_h=td['x'])",
         "m(td, 2.0)", "m(td['x'], k=2.0)"),
        {"made": ("Dispatched()", "Based()", "TensorDictModuleWrapper(Based())")},
    ),
    "install": (
        "Installing({values}, {net}{more})",
        ("m.kept()", "m.during()", "m.after()", "m.failed()", "m.twice()", "m.returned()", "m.swapped()", "m.learned()"),
        {
            "values": ("TensorDict.from_module(Layers()).detach().clone()", "TensorDict.from_module(Layers())",
                       "TensorDict.from_module(Layers()).clone().select('w')", "TensorDictParams(TensorDict.from_module(Layers()).clone())",
                       "TensorDict.from_module(Layers()).detach().clone().lock_()", "TensorDict.from_module(Layers()).data + 1",
                       "TensorDict({'w': torch.ones(2, requires_grad=True), 'inner': {'bias': torch.ones(2, requires_grad=True)}})",
                       "TensorDict({'w': nn.Parameter(torch.ones(2)), 'mean': nn.Parameter(torch.ones(2))})"),
            "net": ("Layers()", "Layers().eval().requires_grad_(False)"),
            "inplace": ("True", "False", "None"),
            "return_swap": ("False", "True"),
            "dest": ("True",),
            "use_state_dict": ("True",),
            "non_blocking": ("True",),
            "preserve_module_state": ("False", "True"),
            "memo": ("None", "{}"),
        },
    ),
}  # fmt: skip
"""For each form of a module: its text, its calls, and for each option some values."""


def pairs(form: str) -> Iterator[tuple[str, str]]:
    """Yield programs: each option with each value, then pairs of options, under every call."""
    text, calls, options = OPTIONS[form]
    places = re.findall(r"{(\w+)}", text)
    defaults = {name: values[0] for name, values in options.items() if name in places}
    chosen: list[dict[str, str]] = [{}]
    for name, values in options.items():
        chosen += [{name: value} for value in values]
    for one, two in itertools.combinations(options, 2):
        both_values = itertools.product(options[one], options[two])
        chosen += [{one: first, two: second} for first, second in both_values]
    for each in chosen:
        given = {**defaults, **each}
        more = "".join(f", {name}={value}" for name, value in given.items() if name not in places)
        made = text.format(more=more, **{name: given[name] for name in places if name != "more"})
        for call in calls:
            yield made, call


class Chain:
    """Makes a random chain of modules, and calls of it."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def _key(self) -> str:
        return self.rng.choice(
            ("'x'", "'x'", "'y'", "'y'", "'z'", "('n', 'h')", "('n', 'y')", "'kept'")
        )

    def _step(self, depth: int) -> str:
        choose, key = self.rng.choice, self._key
        inplace = choose(("", "", "", ", inplace=False", ", inplace='empty'", ", inplace=None"))
        options = [
            *(f"TensorDictModule(plus, [{key()}], [{key()}]{inplace})",) * 3,
            f"TensorDictModule(plus, [{key()}, {key()}], [{key()}]{inplace})",
            f"TensorDictModule(plus, [{key()}, 'lacking'], [{key()}])",
            f"TensorDictModule(plus, {{'x': {key()}, 'h': {key()}}}, [{key()}]{inplace})",
            f"TensorDictModule(both, [{key()}], [{key()}, {choose((key(), chr(39) + '_' + chr(39)))}]{inplace})",
            f"TensorDictModule(Net(), [{key()}], [{key()}]{choose(('', ', method=' + repr('other')))})",
            f"(lambda td: td.set({key()}, td[{key()}] * 2))",
            f"WrapModule(lambda td: td.set({key()}, td[{key()}] + 1), in_keys=[{key()}], out_keys=[{key()}])",
            "Based()",
            f"TensorDictModuleWrapper(TensorDictModule(torch.neg, [{key()}], [{key()}]))",
            f"TensorDictModule(plus, [{key()}], [{key()}]).select_out_keys({key()})",
        ]
        if depth < 2:
            options += [self._sequence(depth + 1)] * 3
        return choose(options)

    def _sequence(self, depth: int) -> str:
        steps = ", ".join(self._step(depth) for _ in range(self.rng.randint(1, 4)))
        options = self.rng.choice(
            [
                *(
                    "",
                    "",
                    "",
                    "",
                    ", inplace=False",
                    ", inplace='empty'",
                    ", partial_tolerant=True",
                ),
                *(f", selected_out_keys=[{self._key()}]", ", inplace=True"),
            ]
        )
        return f"TensorDictSequential({steps}{options})"

    def program(self) -> tuple[str, list[str]]:
        """Return the text of a module, and calls of it."""
        key = self._key
        if self.rng.random() < 0.3:
            head = self._sequence(1)
            draw = self.rng.choice(
                ("", ", return_log_prob=True", ", default_interaction_type=InteractionType.RANDOM")
            )
            options = self.rng.choice(("", "", ", return_composite=True", ", inplace=False"))
            tail = self.rng.choice(("", f", {self._step(2)}"))
            made = (
                f"ProbabilisticTensorDictSequential({head}, TensorDictModule(both, [{key()}], ['loc', 'scale']), "
                f"ProbabilisticTensorDictModule(['loc', 'scale'], ['a'], distribution_class=Normal{draw}){tail}{options})"
            )
            calls = [*DRAWS, *CALLS[:10], *CALLS[-12:], *PARTS]
        else:
            made = self._sequence(0)
            calls = [*CALLS, *PARTS, f"m.select_subsequence(out_keys=[{key()}])(td)", "m[1:](td)",
                     f"m.select_subsequence(in_keys=[{key()}]).out_keys", "m[-1].out_keys",
                     f"m.select_out_keys({key()})(td)", f"m(TensorDict({{{key()}: torch.ones(2)}}, [2]))"]  # fmt: skip
        return made, self.rng.sample(calls, 4)


def chains(seeds: Iterable[int]) -> Iterator[tuple[str, str]]:
    """Yield random programs, four for each chain."""
    for seed in seeds:
        made, calls = Chain(Random(seed)).program()
        for call in calls:
            yield made, call


def group(one: Tried) -> tuple[str, str]:
    """Return what differences of one cause share, most of the time."""
    return one.call, str(one.found)


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(main)))
    parser.add_argument("--form", default=",".join(OPTIONS))
    parser.add_argument("--chains", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--list", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.first, options.first + options.chains)
    sources = {"chains": chains(seeds)} if options.chains else {}
    sources |= {form: pairs(form) for form in options.form.split(",") if form}
    groups: dict[tuple[str, str], list[Tried]] = collections.defaultdict(list)
    for form, programs in sources.items():
        each = [tried(*program) for program in programs]
        differ = [one for one in each if one.found]
        print(f"{form:10s} {len(each):6d} calls {len(differ):5d} differ")
        for one in differ:
            groups[group(one)].append(one)
    for (call, found), ones in sorted(groups.items(), key=lambda item: -len(item[1]))[
        : options.list
    ]:
        one = min(ones, key=lambda one: len(one.made))
        print(f"{len(ones):5d} {call}: {found}\n        {one.made}")
        print(f"        ours   {one.ours}\n        theirs {one.theirs}")


if __name__ == "__main__":
    main()
