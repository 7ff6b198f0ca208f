"""Values are left unread in one thread and checked in the others."""

import copy
import pickle
import threading

import pytest
import torch
from torch.distributions import Distribution, Gamma, Normal

from kd_probabilistic import InteractionType, ProbabilisticTensorDictModule, estimate

POSITIVE = torch.ones(2, 3)


pytestmark = pytest.mark.usefixtures("checks_values")


class Meeting(Normal):
    """A distribution whose construction waits for another thread."""

    entered: threading.Event
    leave: threading.Event

    def __init__(self, loc: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(loc, scale)
        self.entered.set()
        assert self.leave.wait(60)


def mapped(kind: type[Distribution]) -> None:
    module = ProbabilisticTensorDictModule(["loc", "scale"], ["x"], distribution_class=kind)
    torch.vmap(lambda loc, scale: module(loc=loc, scale=scale))(POSITIVE, POSITIVE)


def meeting() -> tuple[type[Meeting], threading.Thread]:
    """Return a distribution, and a thread that is inside its construction under `vmap`."""

    class Here(Meeting):
        entered = threading.Event()
        leave = threading.Event()

    thread = threading.Thread(target=mapped, args=(Here,))
    thread.start()
    assert Here.entered.wait(60)
    return Here, thread


def finish(kind: type[Meeting], thread: threading.Thread) -> None:
    kind.leave.set()
    thread.join()


def test_threads_that_overlap_leave_the_default_as_it_was() -> None:
    first = meeting()
    second = meeting()
    finish(*first)
    finish(*second)
    assert Distribution._validate_args is True


def test_another_thread_checks_values_meanwhile() -> None:
    meeting_here = meeting()
    try:
        with pytest.raises(ValueError, match="Expected parameter scale"):
            Normal(torch.zeros(2), -torch.ones(2))
    finally:
        finish(*meeting_here)


def test_a_default_that_is_set_meanwhile_stays() -> None:
    meeting_here = meeting()
    Distribution.set_default_validate_args(False)
    finish(*meeting_here)
    assert Distribution._validate_args is False


def test_a_default_that_is_read_meanwhile_can_be_set_again() -> None:
    meeting_here = meeting()
    read = Distribution._validate_args
    finish(*meeting_here)
    Distribution.set_default_validate_args(read)
    assert bool(Distribution._validate_args) is True


def test_a_distribution_made_meanwhile_is_copied_and_pickled() -> None:
    meeting_here = meeting()
    try:
        normal = Normal(torch.zeros(2), torch.ones(2))
        expanded = normal.expand([3, 2])
    finally:
        finish(*meeting_here)
    for twin in (copy.deepcopy(expanded), pickle.loads(pickle.dumps(expanded))):
        with pytest.raises(ValueError, match="Expected value argument"):
            twin.log_prob(torch.full((3, 2), torch.nan))


@pytest.mark.parametrize(
    ("kind", "asked"), [(Gamma, InteractionType.MODE), (Normal, InteractionType.MEDIAN)]
)
def test_estimates_are_computed_where_vmap_maps_the_parameters(
    kind: type[Gamma] | type[Normal], asked: InteractionType
) -> None:
    """No value can be read there: whether an estimate exists is left open."""
    numbers = torch.tensor([1.5, 2.0, 3.0])
    mapped = torch.vmap(lambda each: estimate(kind(each, each), asked))(numbers)
    assert torch.equal(mapped, estimate(kind(numbers, numbers), asked))
