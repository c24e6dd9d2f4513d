"""Which spaces a vector environment has, from what its workers built; and how spaces are described."""

from __future__ import annotations

import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from clusterenv.engine.agreement import agree
from clusterenv.errors import SpacesError, SpecError
from clusterenv.wire.channel import plain, with_portable_spaces
from clusterenv.wire.requests import Built
from clusterenv.wire.spaces import DescribedSpace, describe, is_known, portable
from vector_toys import Anything

TWO = spaces.Discrete(2)
BOXES = [spaces.Box(0, high, (3,)) for high in (1, 2, 3, 4)]


def built(observation_space, *others, action_space=TWO):
    return Built(1, observation_space, action_space, {"render_fps": 7}, "rgb_array", list(others), [])


def never():
    raise AssertionError("no space was described")


def test_one_space_for_all():
    agreed = agree({0: built(BOXES[0]), 1: built(BOXES[0])}, [[0, 1], [2]], "same", never)
    assert agreed.single_observation_space == BOXES[0] and agreed.observation_space == batch_space(BOXES[0], 3)
    assert agreed.single_action_space == TWO and agreed.is_same
    assert agreed.metadata == {"render_fps": 7} and agreed.render_mode == "rgb_array"


def test_spaces_that_differ_are_in_the_order_of_slots():
    made = {1: built(BOXES[2], (3, BOXES[3], TWO)), 0: built(BOXES[0], (1, BOXES[1], TWO))}
    agreed = agree(made, [[0, 1], [2, 3]], "different", never)
    assert agreed.observation_space == batch_differing_spaces(BOXES) and not agreed.is_same
    with pytest.raises(SpacesError, match=r"slot 0 has .*1.0, \(3,\).*slot 1 has .*2.0, \(3,\)"):
        agree(made, [[0, 1], [2, 3]], "same", never)


def test_a_worker_speaks_for_its_own_slots_only():
    made = {0: built(BOXES[0], (1, BOXES[3], TWO)), 1: built(BOXES[0])}
    assert agree(made, [[0], [1]], "same", never).is_same


def test_action_spaces_are_the_same_in_every_mode():
    made = {0: built(BOXES[0], (1, BOXES[0], spaces.Discrete(3)))}
    for mode in ("same", "different", (batch_space(BOXES[0], 2), BOXES[0])):
        with pytest.raises(SpacesError, match=r"action spaces.*slot 1 has Discrete\(3\)"):
            agree(made, [[0, 1]], mode, never)


def test_what_is_no_space_is_named():
    with pytest.raises(SpecError, match="observation_space is None"):
        agree({0: built(None)}, [[0]], "same", never)


def test_a_described_space_is_that_of_this_process():
    space = spaces.Dict(a=Anything(), b=BOXES[0])
    made = {worker: with_portable_spaces(built(space)) for worker in (0, 1)}
    assert isinstance(made[0].observation_space, DescribedSpace) and made[0].action_space is TWO
    agreed = agree(made, [[0], [1]], "same", lambda: (space, TWO))
    assert agreed.single_observation_space is space
    agreed = agree(made, [[0], [1]], (batch_space(space, 2), space), lambda: (space, TWO))
    assert agreed.single_observation_space is space
    with pytest.raises(SpacesError, match=r"cannot be batched.*Pass the pair"):
        agree(made, [[0], [1]], "different", lambda: (space, TWO))
    other = spaces.Dict(a=Anything(), b=BOXES[1])
    for mode in ("same", (batch_space(other, 2), other)):
        with pytest.raises(
            SpacesError, match=r"slot 0 has Dict.*1\.0, \(3,\).*made in this process has Dict.*2\.0, \(3,\)"
        ):
            agree(made, [[0], [1]], mode, lambda: (other, TWO))


class Ranged(Anything):
    def __init__(self, high):
        super().__init__()
        self.high = high

    def __repr__(self):
        return f"Ranged({self.high})"


def test_descriptions_are_equal_where_spaces_are_and_travel():
    assert describe(Anything()) == describe(Anything()) == DescribedSpace("vector_toys.Anything")
    assert describe(Ranged(1)) == describe(Ranged(1)) != describe(Ranged(2))
    nested = spaces.Tuple([spaces.Sequence(Ranged(1)), spaces.OneOf([TWO, Anything()]), spaces.Graph(TWO, None)])
    assert str(describe(nested)) == (
        "Tuple(Sequence(test_agreement.Ranged Ranged(1)), OneOf(Discrete(2), vector_toys.Anything), Graph(Discrete(2)))"
    )
    assert plain().unpack(plain().pack(describe(nested))) == describe(nested)


def test_only_what_holds_no_custom_space_travels_as_it_is():
    assert is_known(spaces.Dict(a=spaces.Graph(TWO, BOXES[0]))) and portable(TWO) is TWO and portable(None) is None
    for custom in (Anything(), spaces.Sequence(Anything()), spaces.Graph(TWO, Anything()), spaces.Dict(a=Anything())):
        assert not is_known(custom) and isinstance(portable(custom), DescribedSpace)
