"""The Xid and SXid table: what it holds, its decoding, an operator's rulings over it."""

import pytest

from jobs.errors import SpecError
from ops.diagnosis.verdict import Role
from ops.diagnosis.xids import ACTIONS, load_table, rule_sxid, rule_xid, shipped_table
from ops.incident import FailureClass

OUT = "RESTART_WITHOUT_NODE"


def ruled(code, detail=""):
    return rule_xid(shipped_table(), code, detail)


def test_every_code_says_where_it_is_from_and_what_to_do():
    table = shipped_table()
    assert (len(table.xids), len(table.sxids), len(table.nvlink5)) == (71, 93, 94)
    for code, rule in table.xids.items():
        assert rule.code == code
        assert set(rule.says) >= {"nvidia_immediate", "gpud_event", "dcgm", "aws", "azure_nhc_fail"}
        assert rule.note
        assert rule.ruling.action in ACTIONS
    assert all(ruling.action in ACTIONS for ruling in table.sxids.values())


@pytest.mark.parametrize("code", [48, 64, 74, 79, 95, 119, 120, 140, 143, 158])
def test_broken_hardware_is_left_behind(code):
    ruling = ruled(code)
    assert (ruling.failure_class, ruling.role, ruling.action) == (FailureClass.GPU_HARDWARE, Role.ROOT, OUT)
    assert ruling.confidence >= 0.9


@pytest.mark.parametrize("code", [63, 92])
def test_remapped_rows_and_single_bit_errors_are_noted(code):
    assert (ruled(code).role, ruled(code).action) == (Role.BENIGN, "OBSERVE")


def test_a_contained_memory_error_restarts_its_ranks_only():
    assert (ruled(94).failure_class, ruled(94).action) == (FailureClass.GPU_HARDWARE, "RESTART_RANKS")


@pytest.mark.parametrize("code", [13, 31, 32, 43, 69, 109])
def test_ambiguous_codes_are_no_confident_root(code):
    assert ruled(code).role in (Role.AMBIGUOUS, Role.CASCADE)
    assert ruled(code).confidence <= 0.6


@pytest.mark.parametrize("code", [61, 65, 81, 123])
def test_unused_codes_are_of_low_confidence(code):
    assert ruled(code).confidence < 0.5


@pytest.mark.parametrize("code", [0, 5, 176, 999, 4294967295])
def test_codes_that_nobody_knows(code):
    assert ruled(code).failure_class is FailureClass.UNKNOWN
    assert ruled(code).action == "OBSERVE"


@pytest.mark.parametrize(
    ("code", "detail", "action"),
    [
        (145, "RLW_SRC_TRACK Nonfatal XC0 i0 Link 11 (0x000001c2 0x00000002 0x0)", "OBSERVE"),
        (145, "RLW_SRC_TRACK Non-fatal", "OBSERVE"),
        (145, "RLW_SRC_TRACK Fatal XC0 i0 Link 11 (0x000001c2 0x00000001)", OUT),
        (145, "RLW_REMAP Nonfatal XC0 i0 Link 3 (0x00000082 0x00000004)", "RESTART_RANKS"),
        (145, "RLW_RXPIPE Nonfatal XC1 i0 Link 3 (0x000004c2 0x00000001)", OUT),
        (149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000)", OUT),
        (149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 08 (0x00000226 0x00000001)", "OBSERVE"),
        (144, "SAW_MVB (0x00000021 0x00000010)", OUT),
        (144, "SAW_MVB (0x00000021 0x00000020)", "OBSERVE"),
        (147, "", "OBSERVE"),
        (150, "", OUT),
    ],
)
def test_nvlink_codes_are_ruled_by_severity_and_sub_unit(code, detail, action):
    assert ruled(code, detail).action == action


def test_a_bare_nvlink_code_is_ruled_with_care():
    ruling = ruled(145)
    assert (ruling.action, ruling.confidence) == (OUT, 0.5)
    assert "Severity unknown" in ruling.advice


def test_the_other_end_of_a_link_is_blamed_where_the_table_says_so():
    assert ruled(149, "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x025001c6 0x00000000)").blames_peer
    assert not ruled(149, "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x004505c6 0x00000000)").blames_peer


@pytest.mark.parametrize(
    ("new", "action"),
    [
        ("0x1 (Node Reboot Required)", OUT),
        ("0x1 (GPU Reset Required)", OUT),
        ("0x2 (Drain and Reset)", OUT),
        ("0x3 (Drain P2P)", "RESTART"),
        ("0x0 (None)", "OBSERVE"),
    ],
)
def test_a_changed_recovery_action_is_taken_at_its_word(new, action):
    ruling = ruled(154, f"GPU recovery action changed from 0x4 (Something) to {new}")
    assert ruling.action == action
    assert action == "OBSERVE" or new.split("(")[1][:-1] in ruling.advice


@pytest.mark.parametrize(
    ("code", "detail", "action"),
    [
        (20034, "Fatal, Link 63 LTSSM Fault Up", OUT),
        (12028, "Non-fatal, Link 32 egress non-posted PRIV error (First)", OUT),
        (22013, "Non-fatal, Link 27 Minion Link DLREQ interrupt", "OBSERVE"),
        (24001, "", "OBSERVE"),
        (23017, "", OUT),
        (29999, "Fatal, Link 3 something new", OUT),
        (29999, "Non-fatal, Link 3 something new", "OBSERVE"),
        (29999, "", "OBSERVE"),
    ],
)
def test_sxids_by_class(code, detail, action):
    assert rule_sxid(shipped_table(), code, detail).action == action


def test_an_operator_overrides(tmp_path):
    path = tmp_path / "xids.yaml"
    path.write_text(
        "xids:\n"
        "  63: {class: gpu_hardware, role: root, action: RESTART_WITHOUT_NODE, confidence: 0.9,\n"
        "    advice: house rule}\n"
        "  145: {action: PAGE}\n"
        "  999: {class: environment, role: root, action: STOP}\n"
        "sxids:\n"
        "  12028: {action: OBSERVE}\n"
    )
    table = load_table(path)
    assert (rule_xid(table, 63).action, rule_xid(table, 63).advice) == (OUT, "house rule")
    assert rule_xid(table, 145, "RLW_SRC_TRACK Nonfatal").action == "PAGE"
    assert rule_xid(table, 999).failure_class is FailureClass.ENVIRONMENT
    assert rule_sxid(table, 12028).action == "OBSERVE"
    assert rule_xid(table, 79) == ruled(79)
    assert ruled(63).action == "OBSERVE"  # the shipped table is as it was


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("xids:\n  63: {action: REBOOT}\n", "REBOOT"),
        ("xids:\n  63: {actoin: OBSERVE}\n", "actoin"),
        ("xids:\n  63: {confidence: 2}\n", "confidence=2"),
        ("xids:\n  63: {class: sad}\n", "sad"),
        ("xids:\n  many: {action: OBSERVE}\n", "many"),
        ("xid:\n  63: {action: OBSERVE}\n", "sections"),
        ("- 1\n", "sections"),
        ("xids: [\n", "cannot be read"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path, text, told):
    path = tmp_path / "xids.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=told):
        load_table(path)
