"""Lines of kernel logs in every form that they are kept in."""

import json

import pytest

from ops.diagnosis.kernel_record import parse_record

AT = 1740327858.0
"""2025-02-23 16:24:18 UTC."""


@pytest.mark.parametrize(
    ("line", "at", "host", "level"),
    [
        ("NVRM: x", None, "", ""),
        ("[Sun Feb 23 16:24:18 2025] NVRM: x", AT, "", ""),
        ("kern  :warn  : 2025-02-23T16:24:18,500000+00:00 NVRM: x", AT + 0.5, "", "warn"),
        ("kern  :err   : [   12.300000] NVRM: x", None, "", "err"),
        ("<4>[  201.654822] NVRM: x", None, "", "warn"),
        ("6,3964,206764307,-;NVRM: x", None, "", "info"),
        ("4,100,99,-,caller=T12;NVRM: x", None, "", "warn"),
        ("2025-02-23T17:24:18+0100 node017 kernel: NVRM: x", AT, "node017", ""),
        ("2025-02-23 16:24:18 node017 kernel: NVRM: x", AT, "node017", ""),
        ("Sun 2025-02-23 16:24:18 UTC node017 kernel: NVRM: x", AT, "node017", ""),
        (f"{AT:.6f} node017 kernel: NVRM: x", AT, "node017", ""),
        ("[12345.678901] node017 kernel: NVRM: x", None, "node017", ""),
        ("Feb 23 16:24:18 node017 kernel: [470907.28] NVRM: x", None, "node017", ""),
        ("Feb 23 16:24:18.123456 node017 kernel: NVRM: x", None, "node017", ""),
        ("<3>1 2025-02-23T16:24:18.5Z node017 kernel - - - NVRM: x", AT + 0.5, "node017", "err"),
        ("kernel: NVRM: x\r\n", None, "", ""),
        ("[    5.1] [T1234] NVRM: x", None, "", ""),
    ],
)
def test_what_stands_in_front_is_taken_off(line, at, host, level):
    record = parse_record(line)
    assert record.text == "NVRM: x"
    assert record.at == pytest.approx(at) if at else record.at is None
    assert (record.host, record.level) == (host, level)


def test_a_line_of_the_journal_as_json():
    line = {
        "MESSAGE": "NVRM: x",
        "__REALTIME_TIMESTAMP": "1740327858500000",
        "_HOSTNAME": "n1",
        "PRIORITY": "3",
    }
    record = parse_record(json.dumps(line))
    assert (record.text, record.at, record.host, record.level) == ("NVRM: x", AT + 0.5, "n1", "err")


def test_syslog_leaves_the_year_to_the_reader():
    line = "Feb 29 16:24:18 node017 kernel: x"
    assert parse_record(line, year=2024).at == 1709223858.0
    undated = parse_record(line)
    later = parse_record("Mar  1 00:24:18 node017 kernel: x")
    assert later.clock_s - undated.clock_s == 8 * 3600


def test_a_date_that_there_is_not_is_no_time():
    record = parse_record("Feb 30 16:24:18 node017 kernel: x")
    assert (record.text, record.clock_s) == ("x", None)


@pytest.mark.parametrize("line", ["", "   ", "{", '{"MESSAGE": 3}', "[", "<9", "[Feb", "\x00\x01", "1,2,3"])
def test_other_lines_are_text(line):
    assert parse_record(line).text == line.rstrip()
