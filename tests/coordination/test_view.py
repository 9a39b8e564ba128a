"""What `Control.view` shows of a small run, worked out by hand."""

from __future__ import annotations

import pytest
from by_hand import Hand

from staleflow.coordination.actions import Pull
from staleflow.coordination.events import InstanceLost, StopRequested
from staleflow.protocol.lifecycle import TrajectoryState


def test_the_view_follows_groups_from_pending_to_training() -> None:
    hand = Hand(bound=1, batch_size=2)
    view = hand.control.view
    hand.draw("a", "b", "c")
    assert view.count(TrajectoryState.PENDING) == 3
    assert (view.bound, view.batch_size, view.next_buffer) == (1, 2, 0)
    assert view.placement() == ((0, 0), (0, 0))
    hand.start("a", "b", "c")
    assert view.count(TrajectoryState.RUNNING) == 3
    assert view.resident("i0") == ("a0", "b0", "c0")
    # All three have version 0, so deadline 1, the second of two buffers. The placement fills two per buffer.
    assert view.by_deadline() == ((0, 0), (3, 0))
    assert view.placement() == ((2, 0), (1, 0))
    hand.reward("a0")
    assert view.placement() == ((1, 1), (1, 0))
    assert view.lags(5, occupied=True) == [5]
    assert view.lags(5, occupied=False) == [5, 5]
    assert (view.trainer_idle, view.firm_count) == (True, 3)
    hand.reward("b0")  # the batch of step 0 is complete and leaves
    assert (view.next_buffer, view.trainer_idle, view.firm_count) == (1, False, 1)
    assert view.by_deadline() == ((1, 0), (0, 0))


def test_the_view_shows_instances_with_their_unacknowledged_commands() -> None:
    hand = Hand()
    view = hand.control.view
    assert view.instances() == ("i0",)
    assert view.is_current("i0", 1)
    assert not view.is_current("i0", 2)
    assert (view.instance("i0").kv_capacity, view.outstanding("i0")) == (1000, ())
    pull = Pull(instance="i0", incarnation=1, seq=1, version=0)
    hand._order(pull)
    assert view.outstanding("i0") == (pull,)
    hand.tell(InstanceLost(instance="i0", incarnation=1, reason="killed"))
    assert view.instances() == ()
    assert view.clock.urgent
    hand.cycle()
    assert not view.clock.urgent


def test_the_view_is_read_only_and_tells_why_the_run_ends() -> None:
    hand = Hand()
    view = hand.control.view
    assert (view.finished, view.stopping) == (None, False)
    hand.tell(StopRequested())  # the trainer is idle, so there is no step to wait for
    assert (view.finished, view.stopping) == ("interrupted", True)
    with pytest.raises(AttributeError):
        view.finished = None  # type: ignore[misc]
