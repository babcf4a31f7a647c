"""What an Xid (NVIDIA's driver) or SXid (NVSwitch) means and calls for: a table, and its exceptions.

The rule sets of vendors and operators disagree on many codes; xid_table.json keeps what each says beside our
own ruling, and a YAML file of an operator may override a ruling:

    xids:
      63: {class: gpu_hardware, role: root, action: RESTART_WITHOUT_NODE, confidence: 0.9, advice: ...}
    sxids:
      12028: {action: OBSERVE}

Two kinds are ruled by more than their number. Xids 144 to 150 (NVLink 5) carry a sub-unit, a severity and two
words that the catalogue decodes; the severity in the text wins. Xid 154 says itself what has to be done.
Does not read kernel logs (kernel_log.py).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from jobs.errors import SpecError
from ops.decision import Action
from ops.diagnosis.verdict import Role
from ops.incident import FailureClass

TABLE_PATH = Path(__file__).with_name("xid_table.json")
ACTIONS = frozenset(str(action) for action in Action)
NVLINK5 = range(144, 151)
RECOVERY_ACTION_CHANGED = 154
_NVLINK5_TEXT = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_]+)\b(?:[ ,]+(?P<severity>(?i:(?:Link )?Fatal|Non-?fatal))\b\**)?"
    r"(?:.*?\bXC(?P<contain>\d))?(?:.*?\bLink (?P<link>[0-9A-Fa-f]+))?"
    r"(?:.*?\((?P<words>0x[0-9A-Fa-f]+(?: 0x[0-9A-Fa-f]+)*)\))?",
)
_RECOVERY = re.compile(
    r"changed from 0x[0-9a-f]+ \((?P<old>[^)]*)\) to 0x[0-9a-f]+ \((?P<new>[^)]*)\)", re.IGNORECASE
)


@dataclass(frozen=True)
class Ruling:
    """What we hold a code to be, and what to do about it."""

    failure_class: FailureClass
    role: Role
    action: str
    """As named by ops.decision.Action."""
    confidence: float
    advice: str = ""
    blames_peer: bool = False
    """The device at the other end of the link, not the one that reports."""


@dataclass(frozen=True)
class XidRule:
    """One code of the table."""

    code: int
    mnemonic: str
    description: str
    says: Mapping[str, Any]
    """What each rule set says of it, as it says it; xid_table.json names the sources."""
    note: str
    ruling: Ruling
    repeats: int
    """So often on one GPU, at least a minute apart, and it is taken for broken; 0 = never."""


@dataclass(frozen=True)
class NvlinkRule:
    """One row of the catalogue's decode table of Xids 144 to 150."""

    xid: int
    units: tuple[str, ...]
    subcode: int | None
    """Bits 20 to 25 of the first word."""
    error_status: int | None
    """The second word: flags for Xids 144 to 148, a number for 149."""
    immediate: str
    investigatory: str


@dataclass(frozen=True)
class XidTable:
    """All that is known of codes."""

    xids: Mapping[int, XidRule]
    sxids: Mapping[int, Ruling]
    nvlink5: tuple[NvlinkRule, ...]


UNKNOWN_RULING = Ruling(
    FailureClass.UNKNOWN,
    Role.AMBIGUOUS,
    "OBSERVE",
    0.2,
    "This code is not in the table: look it up for this driver.",
)
DRAIN = Ruling(
    FailureClass.GPU_HARDWARE, Role.ROOT, "RESTART_WITHOUT_NODE", 0.9, "Drain the node and reset the GPU."
)
NOTE = Ruling(FailureClass.BENIGN, Role.BENIGN, "OBSERVE", 0.7, "Not fatal: nothing to be done but note it.")


@cache
def shipped_table() -> XidTable:
    """The table as it is shipped."""
    tree = json.loads(TABLE_PATH.read_text(encoding="ascii"))
    return XidTable(
        xids={
            row["xid"]: XidRule(
                code=row["xid"],
                mnemonic=row["mnemonic"] or "",
                description=row["description"] or "",
                says=row["says"],
                note=row["note"],
                ruling=_ruling(row["decision"]),
                repeats=row.get("repeats", 0),
            )
            for row in tree["xids"]
        },
        sxids={code: _ruling(row["decision"]) for row in tree["sxids"] for code in row["codes"]},
        nvlink5=tuple(
            NvlinkRule(
                xid=row["xid"],
                units=tuple(row["units"]),
                subcode=row.get("subcode"),
                error_status=int(row["error_status"], 16) if "error_status" in row else None,
                immediate=row["immediate"],
                investigatory=row["investigatory"],
            )
            for row in tree["nvlink5"]
        ),
    )


def load_table(overrides: Path | None = None) -> XidTable:
    """The shipped table with an operator's rulings over it.

    Raises:
        SpecError: the file cannot be read, or a key or value of it is not one that there is.
    """
    table = shipped_table()
    if overrides is None:
        return table
    try:
        tree = yaml.safe_load(overrides.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(f"{overrides}: cannot be read: {error}") from error
    if not isinstance(tree, dict) or set(tree) - {"xids", "sxids"}:
        raise SpecError(
            f"{overrides}: holds the sections xids and sxids, each of code: {{ruling}}; got {tree!r}"
        )
    xids, sxids = dict(table.xids), dict(table.sxids)
    for code, row in _rows(tree, "xids", overrides):
        old = xids.get(code, XidRule(code, "", "", {}, "set by the operator", UNKNOWN_RULING, 0))
        xids[code] = replace(old, ruling=_overridden(old.ruling, row, f"{overrides}: xids.{code}"))
    for code, row in _rows(tree, "sxids", overrides):
        sxids[code] = _overridden(sxids.get(code, UNKNOWN_RULING), row, f"{overrides}: sxids.{code}")
    return replace(table, xids=xids, sxids=sxids)


def rule_xid(table: XidTable, code: int, detail: str = "") -> Ruling:
    """The ruling on one Xid.

    Args:
        table: shipped or overridden; an override of 144 to 150 or 154 replaces the decoding too.
        code: the number.
        detail: what the line says after the number; empty where a counter gave the number alone.
    """
    rule = table.xids.get(code)
    if rule is None:
        return UNKNOWN_RULING
    if rule.ruling != _shipped_ruling(code):
        return rule.ruling
    if code in NVLINK5:
        return _rule_nvlink5(table, code, detail)
    if code == RECOVERY_ACTION_CHANGED:
        return _rule_recovery(rule.ruling, detail)
    return rule.ruling


def rule_sxid(table: XidTable, code: int, detail: str = "") -> Ruling:
    """The ruling on one SXid; a number that is not in the table is ruled by the severity in its text."""
    if code in table.sxids:
        return table.sxids[code]
    severity = re.search(r"\b(non-?)?fatal\b", detail, re.IGNORECASE)
    if severity is None:
        return UNKNOWN_RULING
    return replace(NOTE if severity[1] else DRAIN, confidence=0.6)


def nvlink_of(detail: str) -> str:
    """The link that an NVLink 5 line names ("08"); empty where it names none."""
    match = _NVLINK5_TEXT.search(detail)
    return (match["link"] or "") if match else ""


def _rule_nvlink5(table: XidTable, code: int, detail: str) -> Ruling:
    match = _NVLINK5_TEXT.search(detail)
    unit = match["unit"].upper() if match else ""
    severity = (match["severity"] or "").lower().replace("-", "") if match else ""
    rows = [r for r in table.nvlink5 if r.xid == code and (not unit or unit in r.units)]
    rows = rows or [r for r in table.nvlink5 if r.xid == code]
    words = [int(word, 16) for word in match["words"].split(" ")] if match and match["words"] else []
    decoded = [r for r in rows if len(words) > 1 and _decodes(r, words[0], words[1])]
    investigate = sorted({r.investigatory for r in decoded} - {"IGNORE", "CONTACT_SUPPORT"})
    advice = f"NVIDIA's table says: {', '.join(investigate)}." if investigate else ""
    immediate = {r.immediate for r in decoded or rows}
    if severity == "nonfatal":
        if match and unit == "RLW_RXPIPE" and (match["contain"] or "0") != "0":
            return replace(
                DRAIN, confidence=0.6, advice="Not fatal by its text, but across a containment border."
            )
        if "XID_154_EVAL" in immediate and decoded:
            follow = "Do what an Xid 154 beside it says; without one restart the program. "
            return Ruling(FailureClass.UNKNOWN, Role.AMBIGUOUS, "RESTART_RANKS", 0.4, follow + advice)
        return replace(NOTE, advice=" ".join(t for t in (NOTE.advice, advice) if t))
    is_peer = "INVESTIGATE_PEER_DEVICE" in investigate
    advice = " ".join(text for text in (DRAIN.advice, advice) if text)
    if severity:
        doubt = 0.3 if decoded and "RESET_GPU" not in immediate else 0.0
        return replace(DRAIN, confidence=DRAIN.confidence - doubt, advice=advice, blames_peer=is_peer)
    if immediate == {"IGNORE"}:
        return replace(NOTE, confidence=0.6)
    if immediate == {"RESET_GPU"} or (decoded and "RESET_GPU" in immediate):
        return replace(DRAIN, confidence=0.8, advice=advice, blames_peer=is_peer)
    return replace(
        DRAIN, confidence=0.5, advice="Severity unknown: the line with its sub-unit decides. " + advice
    )


def _decodes(rule: NvlinkRule, info: int, status: int) -> bool:
    if rule.subcode is not None and rule.subcode != (info >> 20) & 0x3F:
        return False
    if rule.error_status is None:
        return True
    return bool(rule.error_status & status) if rule.xid < 149 else rule.error_status == status


def _rule_recovery(ruling: Ruling, detail: str) -> Ruling:
    match = _RECOVERY.search(detail)
    if match is None:
        return ruling
    new = match["new"].strip()
    if new.lower() == "none":
        return replace(
            NOTE, advice=f"The GPU has recovered: its action was {match['old']!r} and is none now."
        )
    mild = {"restart app": "RESTART_RANKS", "drain p2p": "RESTART"}
    action = mild.get(new.lower(), ruling.action)
    return replace(ruling, action=action, advice=f"The driver itself says: {new}.")


@cache
def _shipped_ruling(code: int) -> Ruling | None:
    rule = shipped_table().xids.get(code)
    return rule.ruling if rule is not None else None


def _ruling(row: Mapping[str, Any]) -> Ruling:
    return Ruling(
        FailureClass(row["failure_class"]), Role(row["role"]), row["action"], row["confidence"], row["advice"]
    )


def _rows(tree: Mapping[str, Any], section: str, path: Path) -> list[tuple[int, dict[str, Any]]]:
    rows = tree.get(section) or {}
    if not isinstance(rows, dict):
        raise SpecError(f"{path}: {section} maps codes to rulings, got {rows!r}")
    for code, row in rows.items():
        if not isinstance(code, int) or not isinstance(row, dict):
            raise SpecError(f"{path}: {section}.{code}: want a number and a ruling in braces, got {row!r}")
    return list(rows.items())


def _overridden(old: Ruling, row: Mapping[str, Any], where: str) -> Ruling:
    known = {"class", "role", "action", "confidence", "advice"}
    if set(row) - known:
        raise SpecError(f"{where}: unknown key {sorted(set(row) - known)[0]!r}; there are {sorted(known)}")
    action, confidence = row.get("action", old.action), row.get("confidence", max(old.confidence, 0.8))
    if action not in ACTIONS:
        raise SpecError(f"{where}: no action {action!r}; there are {sorted(ACTIONS)}")
    if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 <= confidence <= 1:
        raise SpecError(f"{where}: confidence={confidence!r}, but it is a number from 0 to 1")
    try:
        failure_class = FailureClass(row.get("class", old.failure_class))
        role = Role(row.get("role", old.role))
    except ValueError as error:
        raise SpecError(
            f"{where}: {error}; classes are those of packtrain, roles {[r.value for r in Role]}"
        ) from None
    return Ruling(failure_class, role, action, float(confidence), str(row.get("advice", old.advice)))
