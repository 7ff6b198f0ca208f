"""The list of steps that a sequence is: looking up, adding, replacing and removing them.

Steps without names live in an `nn.ModuleList`, named ones in an `nn.ModuleDict`; either way the
parameters of step `k` are called `module.k...`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Self, SupportsIndex, cast, overload

from torch import nn

from kd_core import InvalidArgument, KeyNotFound, NestedKey, OutOfRange, TensorDictBase
from kd_core.extending import plain_str
from kd_nn._dispatch import Inplace, describe, has_entry, keys_of
from kd_nn._errors import KeysNotDeclared, NotKeyed, list_keys, suggest
from kd_nn._modules.base import TensorDictModuleBase, keys_as_parsed
from kd_nn._plan.invalidation import Flagged
from kd_nn._plan.program import Scope, keyed
from kd_nn._torch_private import REGISTRATION_HOOKS

# The modules of torch that hold the steps of a sequence, in a form that announces its edits.
#
# `model.module` may be edited like any `nn.ModuleList`. Each edit raises flags, so that reading
# the keys of a sequence compares no steps: the row "in_keys of 10 layers". `_modules` stays a
# plain dict, as dynamo expects. Copies and pickles hold the class of torch: they load without this
# library, and the sequence that gets one turns it into one of these.


class _Holder(Flagged):
    """What both kinds share; members that are assigned or deleted as attributes are seen there."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a member, or replace one."""
        try:
            super().add_module(name, module)
        finally:
            self._kd_flag_change()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Return how to copy or pickle it: as the class of torch."""
        plain = _PLAIN.get(type(self))
        if plain is None:  # a class that FSDP made, say
            return super().__reduce_ex__(protocol)
        return plain, (), self.__getstate__()

    def _get_name(self) -> str:
        return _PLAIN.get(type(self), type(self)).__name__


class StepModuleList(_Holder, nn.ModuleList):
    """An `nn.ModuleList` that raises flags when a member is added, replaced, moved or removed."""

    _kd_changes_by_assignment = True
    _kd_announces_members = True

    def insert(self, index: int, module: nn.Module) -> None:
        """Insert a member before a place."""
        try:
            super().insert(index, module)
        finally:
            self._kd_flag_change()


class StepModuleDict(_Holder, nn.ModuleDict):
    """An `nn.ModuleDict` that raises flags when a member is added, replaced, moved or removed."""

    _kd_changes_by_assignment = True
    _kd_announces_members = True

    def __delitem__(self, key: str) -> None:
        """Remove a member."""
        try:
            super().__delitem__(key)
        finally:
            self._kd_flag_change()

    def clear(self) -> None:
        """Remove all members."""
        super().clear()
        self._kd_flag_change()


_PLAIN: Final[dict[type, type[nn.Module]]] = {
    StepModuleList: nn.ModuleList,
    StepModuleDict: nn.ModuleDict,
}
_ANNOUNCING: Final[dict[type, type]] = {plain: kind for kind, plain in _PLAIN.items()}


def hold(steps: Iterable[nn.Module]) -> StepModuleList:
    """Return a list of steps, which are known to be modules: torch would check each again."""
    if REGISTRATION_HOOKS:
        return StepModuleList(steps)
    held = StepModuleList()
    held._modules.update({str(idx): step for idx, step in enumerate(steps)})
    return held


def adopt(holder: nn.Module | None) -> None:
    """Convert a list or dict of torch, in a new copy, to one that announces its edits."""
    if type(holder) in _ANNOUNCING:
        holder.__class__ = _ANNOUNCING[type(holder)]


Modules = nn.Module | list[nn.Module] | dict[str, nn.Module]
Step = tuple[str, nn.Module]


class StepList(TensorDictModuleBase):
    """A keyed module that holds others in order."""

    _kd_changes_by_assignment = True

    module: nn.ModuleList | nn.ModuleDict
    partial_tolerant: bool
    inplace: Inplace

    def _kd_named_steps(self) -> list[tuple[str, nn.Module]]:
        """Return name and module of each step, in order."""
        # Not `self.module`, which torch looks up in Python.
        steps = [*self._modules["module"]._modules.items()]  # type: ignore[union-attr]  # it is there
        return [(plain_str(name), step) for name, step in steps]

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore the attributes of a copy or pickle, whose steps are in a list of torch."""
        restore: Callable[[dict[str, object]], None] = super().__setstate__
        restore(state)
        adopt(self._modules.get("module"))

    def _kd_scope(self) -> Scope | None:
        """Return the scope that the first steps run in; None for most sequences."""
        return None

    def _kd_feeds_last(self) -> bool:
        """Return whether the last step is fed by earlier ones; see `_kd_fed_keys`."""
        return False

    @property
    def _kd_fed(self) -> bool:
        """The same, as long as nothing changes."""
        return self._kd_feeds_last()

    @property
    def _kd_may_skip(self) -> bool:
        """Whether a step may be left out for want of inputs, here or in a sequence inside."""
        if self.__dict__.get("partial_tolerant"):
            return True
        return any(
            getattr(step, "_kd_may_skip", False) is True for _, step in self._kd_named_steps()
        )

    @property
    def _kd_replaces_container(self) -> bool | None:
        """Whether the result may be another container than the input; None if no step says."""
        if self.__dict__.get("inplace") not in (True, None):
            return True
        says = [getattr(step, "_kd_replaces_container", None) for _, step in self._kd_named_steps()]
        if True in says:
            return True
        return None if None in says else False

    def append(self, module: nn.Module) -> Self:
        """Add a step at the end; return the sequence."""
        steps = self._kd_named_steps()
        return self._kd_replace_steps([*steps, (free_name(dict(steps)), module)])

    def extend(
        self, modules: Iterable[nn.Module] | Mapping[str, nn.Module] | nn.ModuleDict
    ) -> Self:
        """Add steps at the end: all of them, or none if one is refused.

        Args:
            modules: Keyed modules; or a dict, which names the steps.

        Returns:
            The sequence.

        Raises:
            NotKeyed: If something is not a keyed module.
            InvalidArgument: If a name is taken, or one module is given instead of several.

        Example:
            >>> import torch
            >>> from kd_nn import TensorDictModule, TensorDictSequential
            >>> model = TensorDictSequential(TensorDictModule(torch.neg, ["x"], ["y"]))
            >>> model.extend([TensorDictModule(torch.exp, ["y"], ["z"])]).out_keys
            ['y', 'z']
        """
        if not isinstance(modules, Iterable):
            raise InvalidArgument(
                f"`extend` expected several keyed modules, got {type(modules).__name__}. "
                "Pass a list or dict of them, or use `append`."
            )
        steps = dict(self._kd_named_steps())
        if isinstance(modules, (Mapping, nn.ModuleDict)):
            for name, module in modules.items():
                steps[self._kd_new_name(name, steps)] = module
            return self._kd_replace_steps(list(steps.items()), named=True)
        for module in modules:
            steps[free_name(steps)] = module
        return self._kd_replace_steps(list(steps.items()))

    def insert(self, name: str | int, module: nn.Module, after: str | int | None = None) -> Self:
        """Add a step.

        Args:
            name: The name of the step; or, as an int, its place.
            module: A keyed module.
            after: The name or index of the step that comes before; None puts a named step first.

        Returns:
            The sequence.

        Raises:
            KeyNotFound: If `after` is not a step.
            OutOfRange: If there is no such place.
            InvalidArgument: If the name is taken.
        """
        steps = self._kd_named_steps()
        if isinstance(name, int):
            if not -len(steps) <= name <= len(steps):
                raise _out_of_range(self, name, len(steps))
            steps.insert(name, (free_name(dict(steps)), module))
            return self._kd_replace_steps(steps)
        name = self._kd_new_name(name, dict(steps))
        place = 0 if after is None else list(dict(steps)).index(self._kd_name_of(after)) + 1
        steps.insert(place, (name, module))
        return self._kd_replace_steps(steps, named=True)

    def pop(self, index: int | str = -1) -> TensorDictModuleBase:
        """Remove one step, the last one unless another is asked for, and return it.

        Args:
            index: Its place or its name.

        Raises:
            IndexError: If there is no such place.
            KeyNotFound: If there is no step of that name, or a selected output is written by this
                step alone; nothing changes.

        Example:
            >>> import torch
            >>> from kd_nn import TensorDictModule, TensorDictSequential
            >>> first = TensorDictModule(torch.neg, ["x"], ["y"])
            >>> model = TensorDictSequential(first, TensorDictModule(torch.exp, ["y"], ["z"]))
            >>> model.pop(0) is first, model.in_keys
            (True, ['y'])
        """
        name = self._kd_name_of(index)
        step = self[name]
        del self[name]
        return step

    def __len__(self) -> int:
        return len(self.module)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._kd_steps())

    @overload
    def __getitem__(self, index: int | str) -> TensorDictModuleBase: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | str | slice) -> nn.Module:
        """Return one step, or a sequence of some of them, which shares the modules."""
        if isinstance(index, slice):
            return self._kd_part(self._kd_named_steps()[index])
        return dict(self._kd_named_steps())[self._kd_name_of(index)]

    def __setitem__(self, index: int | str, tensordict_module: nn.Module) -> None:
        """Replace a step, or with a new name add one at the end."""
        steps = dict(self._kd_named_steps())
        if isinstance(index, str) and index not in steps:
            self._kd_replace_steps(
                [*steps.items(), (check_name(index), tensordict_module)], named=True
            )
            return
        steps[self._kd_name_of(index)] = tensordict_module
        self._kd_replace_steps(list(steps.items()))

    def __delitem__(self, index: int | str | slice) -> None:
        """Remove one step, or some."""
        steps = self._kd_named_steps()
        if isinstance(index, slice):
            del steps[index]
        else:
            gone = self._kd_name_of(index)
            steps = [(name, step) for name, step in steps if name != gone]
        self._kd_replace_steps(steps)

    def _kd_part(self, steps: Sequence[Step], kind: type | None = None) -> Self:
        """Return a sequence of some of the steps, of the same kind unless another is given."""
        named = isinstance(self.module, nn.ModuleDict)
        if kind is None and not self._kd_changes_by_assignment:
            return self._kd_like(steps, named)
        build: Callable[..., Self] = kind or type(self)
        return build(
            dict(steps) if named else [step for _, step in steps],
            partial_tolerant=self.partial_tolerant,
            inplace=self.inplace,
        )

    def _kd_like(self, steps: Sequence[Step], named: bool) -> Self:
        """Return a sequence of a class of the user, whose constructor may take anything else."""
        new = type(self).__new__(type(self))
        for name, value in self.__getstate__().items():
            new.__dict__[name] = copy.copy(value) if isinstance(value, dict) else value
        new.__dict__["_kd_selected"] = None
        new.module = StepModuleDict(dict(steps)) if named else hold([step for _, step in steps])
        return new

    def _kd_replace_steps(self, steps: Sequence[Step], named: bool = False) -> Self:
        steps = [(name, as_step(name, step)) for name, step in steps]
        selected = self.__dict__.get("_kd_selected")
        before = self.module
        if named or isinstance(before, nn.ModuleDict):
            self.module = StepModuleDict(dict(steps))
        else:
            self.module = hold([step for _, step in steps])
        if selected is not None:
            try:
                self.select_out_keys(*selected)
            except KeyNotFound:
                self.module = before
                raise
        return self

    def _kd_skips(self, step: nn.Module, tensordict: TensorDictBase, is_fed: bool = False) -> bool:
        """Return whether a step is left out of a call, since an input that it needs is missing."""
        if not self.__dict__.get("partial_tolerant"):
            return False
        missing = [key for key in keys_of(step, "in_keys") if not has_entry(tensordict, key)]
        if is_fed and any(not has_entry(tensordict, key) for key in keyed(step)._kd_fed_keys()):
            return True
        return any(needs_key(step, key) for key in missing)

    def _kd_needs_key(self, key: NestedKey) -> bool:
        steps = [step for step in self._kd_steps() if key in keys_of(step, "in_keys")]
        return not steps or any(needs_key(step, key) for step in steps)

    def _kd_steps(self) -> list[nn.Module]:
        return [step for _, step in self._kd_named_steps()]

    def _kd_new_name(self, name: str, steps: Mapping[str, nn.Module]) -> str:
        name = check_name(name)
        if name in steps:
            raise InvalidArgument(f"{describe(self)} has a step `{name}` already: {list(steps)}.")
        return name

    def _kd_name_of(self, index: int | str) -> str:
        names = [name for name, _ in self._kd_named_steps()]
        if isinstance(index, int) and -len(names) <= index < len(names):
            return names[index]
        if isinstance(index, str) and index in names:
            return index
        if isinstance(index, int):
            raise _out_of_range(self, index, len(names))
        raise KeyNotFound(
            f"step `{index}` of {describe(self)} not found; available steps: {list_keys(names)}."
            f"{suggest(index, names)}"
        )


def _out_of_range(sequence: StepList, index: int, count: int) -> OutOfRange:
    return OutOfRange(
        f"index {index} is out of range for the {count} steps of {describe(sequence)}."
    )


def named_steps(modules: Sequence[Modules]) -> list[Step]:
    """Return name and module of each step given to a sequence.

    Raises:
        NotKeyed: If one of them is not a keyed module.
    """
    if _are_named(modules):
        given = cast("Mapping[str, nn.Module]", modules[0])
        named = [(check_name(name), step) for name, step in given.items()]
    else:
        alone = len(modules) == 1 and isinstance(modules[0], (list, tuple, nn.ModuleList))
        steps = cast("Sequence[nn.Module]", modules[0] if alone else modules)
        named = [(str(idx), step) for idx, step in enumerate(steps)]
    return [(name, as_step(name, step)) for name, step in named]


def store_steps(modules: Sequence[Modules]) -> nn.ModuleList | nn.ModuleDict:
    """Return the module that holds the steps given to a sequence.

    Raises:
        NotKeyed: If one of them is not a keyed module.
    """
    steps = named_steps(modules)
    return StepModuleDict(dict(steps)) if _are_named(modules) else hold([s for _, s in steps])


def _are_named(modules: Sequence[Modules]) -> bool:
    return len(modules) == 1 and isinstance(modules[0], (dict, nn.ModuleDict))


def needs_key(step: nn.Module, key: NestedKey) -> bool:
    """Return whether a step that reads a key cannot run without it."""
    return not isinstance(step, TensorDictModuleBase) or step._kd_needs_key(key)


def free_name(taken: Mapping[str, nn.Module]) -> str:
    """Return the number of the next step as a name, or the first one after it that is free."""
    idx = len(taken)
    while str(idx) in taken:
        idx += 1
    return str(idx)


def check_name(name: object) -> str:
    """Return the name of a step as a plain `str`.

    Raises:
        InvalidArgument: If torch cannot name a sub-module so: not a str, empty, or with a dot.
    """
    if not isinstance(name, str) or not name or "." in name:
        raise InvalidArgument(
            f"a step is named by a str without a dot, as sub-modules are, got {name!r}."
        )
    return plain_str(name)


def as_step(name: str, step: object) -> nn.Module:
    """Return a step: a keyed module, or a function of a container in a `WrapModule`.

    Raises:
        NotKeyed: If it is neither.
    """
    if isinstance(step, TensorDictModuleBase):
        check_keyed(name, step)
        return step
    if isinstance(step, nn.Module):
        without = not (hasattr(step, "in_keys") or hasattr(step, "out_keys"))
        takes_tensors = type(step).__module__.startswith("torch.nn.modules.")
        if takes_tensors or not without:
            check_keyed(name, step)
            return step
    elif isinstance(step, type) or not callable(step):
        check_keyed(name, step)
    from kd_nn._modules.module import WrapModule  # few sequences have functions as steps

    return WrapModule(cast("Callable[[TensorDictBase], TensorDictBase]", step))


def check_keyed(name: str, step: object) -> None:
    """Raise unless `step` is an `nn.Module` with `in_keys` and `out_keys`.

    Raises:
        NotKeyed: With the remedy.
    """
    if isinstance(step, nn.Module):
        try:
            keys_as_parsed(step)
            return
        except KeysNotDeclared:
            pass  # which of them, and why, is said below
    if not callable(step):
        raise NotKeyed(
            f"step `{name}` must be a keyed module, got {type(step).__name__}: {step!r}. "
            "Pass keyed modules, or one list or dict of them."
        )
    kind = getattr(step, "__name__", type(step).__name__)
    if getattr(step, "in_keys", None) is None or not isinstance(step, nn.Module):
        raise NotKeyed(f"step `{name}` {_remedy(step, kind)}")
    raise NotKeyed(f"step `{name}` (`{kind}`) has in_keys but no out_keys. Declare both.")


def _remedy(step: object, kind: str) -> str:
    """Return why something callable is not a keyed module, and what to pass instead."""
    if isinstance(step, type) and issubclass(step, nn.Module):
        return f"is the class `{kind}`. Give an instance: `{kind}(...)`."
    if isinstance(step, TensorDictModuleBase):
        return (
            f"(`{kind}`) declares no in_keys. Declare them in the class "
            '(`in_keys = ["x"]`) or set them in `__init__`.'
        )
    return (
        f"(`{kind}`) has no keys. Wrap it: "
        f"`TensorDictModule({kind}, in_keys=[...], out_keys=[...])`, "
        "or `WrapModule` if it takes a container."
    )
