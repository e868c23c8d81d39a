"""The serving demo plays its story with real processes, and its second question is faster."""

import re


def test_the_second_question_is_faster(start_program):
    program = start_program("-m", "serving.demo")
    assert program.wait(100) == 0, program.output
    first, second = re.findall(r"question \d\s+([\d,]+)\s+([\d,]+)\s+([\d,]+) ms", program.output)
    assert int(first[1].replace(",", "")) == 0
    assert int(second[1].replace(",", "")) > 4000
    assert "times as soon" in program.output
