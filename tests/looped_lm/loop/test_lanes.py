"""Lanes against plain loops."""

from __future__ import annotations

import torch

from looped_lm import HyperConnectionLanes, SingleLane


def test_hyperconnections_start_as_the_specification_says() -> None:
    lanes = HyperConnectionLanes(8, 5, num_lanes=3)
    assert [int(row.argmax()) for row in lanes.alpha] == [0, 1, 2, 0, 1]
    assert bool((lanes.alpha.sum(1) == 1).all()) and bool((lanes.beta == 1).all())
    assert all(torch.equal(m, torch.eye(3)) for m in lanes.mixing)
    assert sum(p.numel() for p in lanes.parameters()) == 5 * (9 + 6)


def test_read_write_reduce_equal_a_loop_over_lanes() -> None:
    torch.manual_seed(0)
    lanes = HyperConnectionLanes(8, 2, num_lanes=3)
    with torch.no_grad():
        for p in lanes.parameters():
            p.normal_()
    states = [torch.randn(2, 4, 8) for _ in range(3)]
    y = torch.randn(2, 4, 8)
    stacked = torch.stack(states)
    alpha, mixing, beta = lanes.alpha[1], lanes.mixing[1], lanes.beta[1]
    torch.testing.assert_close(lanes.read(stacked, 1), sum(alpha[k] * states[k] for k in range(3)))
    written = lanes.write(stacked, y, 1)
    for j in range(3):
        expected = sum(mixing[j, k] * states[k] for k in range(3)) + beta[j] * y
        torch.testing.assert_close(written[j], expected)
    torch.testing.assert_close(lanes.reduce(stacked), states[0] + states[1] + states[2])
    assert torch.equal(lanes.expand(y)[2], y)


def test_a_single_lane_is_the_plain_state() -> None:
    s, y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    lane = SingleLane(8, 2)
    assert lane.read(lane.expand(s), 0) is s and lane.reduce(lane.write(s, y, 0)) is y
    assert not list(lane.parameters())


def test_lanes_stay_fp32_under_autocast() -> None:
    lanes = HyperConnectionLanes(8, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        written = lanes.write(lanes.expand(torch.randn(1, 4, 8)), torch.randn(1, 4, 8), 0)
    assert written.dtype is torch.float32
