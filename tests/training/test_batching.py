from dataclasses import replace

import numpy as np
import pytest

from staleflow.data.trajectory import Segment, token_hash
from staleflow.training.batching import micro_batches, row_of


def cut(members, budget, advantages=None):
    rows = [
        replace(row, advantages=np.full(len(row.tokens), a, dtype=np.float32))
        for row, a in zip(map(row_of, members), advantages or [1.0] * len(members), strict=True)
    ]
    return micro_batches(rows, np.full(len(rows), 0.5), budget)


def test_rows_are_laid_out_right_padded_with_entry_t_about_token_t(member):
    short = member("g", 0, [7, 8], 1.0, prompt=[1], log_probs=[-0.5, -0.25], version=[3, 4])
    long = member("g", 1, [9], 0.0, prompt=[1, 2, 3], log_probs=[-1.0], version=5)
    (micro,) = cut([short, long], 100, [2.0, -1.0])
    assert micro.trajectory_ids == ("g-m0", "g-m1")
    assert micro.input_ids.tolist() == [[1, 7, 8, 0], [1, 2, 3, 9]]
    assert micro.loss_mask.tolist() == [[False, True, True, False], [False, False, False, True]]
    assert micro.behaviour.tolist() == [[0.0, -0.5, -0.25, 0.0], [0.0, 0.0, 0.0, -1.0]]
    assert micro.versions.tolist() == [[-1, 3, 4, -1], [-1, -1, -1, 5]]
    assert micro.advantages.tolist() == [[2.0, 2.0, 2.0, 0.0], [-1.0] * 4]
    assert micro.scale.tolist() == [[0.5], [0.5]]


def test_given_segments_are_context_but_not_in_the_loss(member):
    generated = Segment(
        generated=True,
        tokens=np.array([5, 6], dtype=np.int32),
        log_probs=np.array([-1.0, -1.0], dtype=np.float32),
        versions=np.array([2, 2], dtype=np.int32),
    )
    turns = (generated, Segment.given([8, 9]), generated)
    (micro,) = cut([member("g", 0, [], 1.0, prompt=[1], segments=turns)], 100)
    assert micro.input_ids.tolist() == [[1, 5, 6, 8, 9, 5, 6]]
    assert micro.loss_mask.tolist() == [[False, True, True, False, False, True, True]]
    (record,) = micro.trained(version=3)
    assert (record.min_version, record.max_version, record.tokens) == (2, 2, 4)
    assert record.token_hash == token_hash(np.array([5, 6, 8, 9, 5, 6], dtype=np.int32))


def test_what_was_trained_on_is_read_back_from_the_tensors(member):
    """F14: the hash of the padded tensor's response is that of the sampled ids, and follows the tensor."""
    members = [member("g", 0, [7, 8], 1.0, version=[3, 4]), member("g", 1, [9] * 6, 0.0, version=4)]
    (micro,) = cut(members, 100)
    first, second = micro.trained(version=4)
    assert (first.trajectory_id, first.min_version, first.max_version, first.tokens) == ("g-m0", 3, 4, 2)
    assert first.token_hash == token_hash(members[0].trajectory.tokens)
    assert second.token_hash == token_hash(members[1].trajectory.tokens)
    micro.input_ids[0, 3] = 1
    assert micro.trained(version=4)[0].token_hash == token_hash(np.array([1, 8], dtype=np.int32))


def test_an_unusable_member_is_recorded_but_has_no_token_in_the_loss(member):
    (micro,) = cut([member("g", 0, [7, 8], 0.0, version=3, usable=False), member("g", 1, [], 0.0)], 100)
    assert not micro.loss_mask.any()
    records = {record.trajectory_id: record for record in micro.trained(version=4)}
    assert (records["g-m0"].tokens, records["g-m0"].min_version) == (0, 3)
    assert (records["g-m1"].tokens, records["g-m1"].min_version) == (0, 4)


def test_micro_batches_keep_to_the_budget_and_put_like_lengths_together(member):
    lengths = [9, 2, 5, 2, 9, 5]  # with one prompt token: 10, 3, 6
    members = [member("g", m, [4] * n, 1.0, prompt=[1]) for m, n in enumerate(lengths)]
    cuts = [micro.trajectory_ids for micro in cut(members, 12)]
    assert cuts == [("g-m1", "g-m3"), ("g-m2", "g-m5"), ("g-m0",), ("g-m4",)]


def test_a_row_longer_than_the_budget_goes_alone(member):
    members = [member("g", m, [4] * 9, 1.0) for m in range(2)]
    assert [micro.trajectory_ids for micro in cut(members, 5)] == [("g-m0",), ("g-m1",)]


def test_an_empty_prompt_is_refused(member):
    with pytest.raises(ValueError, match="g-m0 has an empty prompt"):
        row_of(member("g", 0, [4], 1.0, prompt=[]))
