import pytest
from low_rank_injection import LowRankInjection

from looped_lm.conformance import checks


@pytest.mark.parametrize("check", checks(injection=LowRankInjection), ids=str)
def test_low_rank_injection(check):
    check()
