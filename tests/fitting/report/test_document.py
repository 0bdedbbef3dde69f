"""Numbers and tables as they are printed."""

import pytest

from fitting.report.document import markdown_table, significant, table


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [
        (0.43321, 4, "0.4332"), (28.133, 5, "28.133"), (928.07, 4, "928.1"), (1234.5, 4, "1234"), (0.0, 4, "0.000"),
        (-0.0123456, 3, "-0.0123"), (1.234e-7, 3, "1.23e-07"), (3.393e8, 4, "3.393e+08"), (None, 4, "-"),
        (float("inf"), 2, "inf"),
    ],
)  # fmt: skip
def test_significant_digits(value, digits, shown):
    assert significant(value, digits) == shown


def test_columns_align_text_left_and_numbers_right():
    lines = table(["name", "value"], [["a", "1.5"], ["longer", "-12.25"]]).split("\n")
    assert lines == ["  name     value", "  a          1.5", "  longer  -12.25"]
    assert table(["", ""], [["a", "x"]]) == "  a  x"


def test_markdown_escapes_what_would_break_a_cell():
    assert markdown_table(["a"], [["x|y"]]).split("\n") == ["| a |", "|---|", "| x\\|y |"]
