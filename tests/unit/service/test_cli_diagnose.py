"""`packtrain diagnose`: one verdict a file, or a line; kernel logs and dumps among them; wrong input told."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from tests.support.commands import command, refusal

DATA = Path(__file__).parents[2] / "data"
FIELDS = {"file", "class", "role", "culprit", "action", "confidence", "evidence"}
OUT_OF_MEMORY = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
VICTIM = "[rank0]: [E] gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:32150\n"


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "rank-00000.log").write_text("step 1 | loss 2.0\n" + VICTIM)
    (folder / "rank-00001.log").write_text("step 1 | loss 2.0\n\n" + OUT_OF_MEMORY)
    return folder


def test_one_verdict_for_each_file_and_the_one_where_it_began(logs: Path) -> None:
    rows = command("diagnose", str(logs / "rank-00000.log"), str(logs / "rank-00001.log"), "--json").json
    assert all(set(row) >= FIELDS for row in rows)
    assert [row["class"] for row in rows] == ["network", "gpu_out_of_memory"]
    assert [row["role"] for row in rows] == ["cascade", "root"]
    assert [row["is_root"] for row in rows] == [False, True]
    assert rows[1]["culprit"] == "rank 1"
    assert rows[1]["evidence"] == OUT_OF_MEMORY.strip()


def test_a_folder_in_words(logs: Path) -> None:
    answer = command("diagnose", str(logs))
    assert answer.code == 0
    title = "all together: gpu_out_of_memory (root, confidence 0.90)"
    assert title in answer.out
    assert f"evidence  {OUT_OF_MEMORY.strip()}" in answer.out.split(title)[1]


def test_one_verdict_for_each_line(logs: Path) -> None:
    path = logs / "rank-00001.log"
    rows = command("diagnose", str(path), "--json", "--lines").json
    assert [row["line"] for row in rows] == [1, 2, 3]
    assert [row["class"] for row in rows] == ["unknown", "unknown", "gpu_out_of_memory"]
    assert rows[0]["confidence"] == 0.0
    assert command("diagnose", str(path), "--lines").out.startswith(f"{path}:3: gpu_out_of_memory (root)")


def test_source_in_a_traceback_is_nobodys_word_in_lines_too(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(
        'Traceback (most recent call last):\n  File "a.py", line 2, in f\n'
        "    fail('[Errno 28] No space left on device')\nKeyError: 'x'\n"
    )
    rows = command("diagnose", str(path), "--json", "--lines").json
    assert [row["class"] for row in rows] == ["unknown", "unknown", "unknown", "user_code"]


def test_a_kernel_log_and_a_packed_log_and_one_of_json_lines(tmp_path: Path) -> None:
    kernel = tmp_path / "dmesg.txt"
    kernel.write_text("[2397166.92] NVRM: Xid (PCI:0000:0f:00): 79, GPU has fallen off the bus.\n")
    packed = tmp_path / "old.log.gz"
    packed.write_bytes(gzip.compress(OUT_OF_MEMORY.encode()))
    shipped = tmp_path / "pod.json"
    shipped.write_text(json.dumps({"log": OUT_OF_MEMORY, "stream": "stderr"}) + "\n")
    rows = command("diagnose", str(kernel), str(packed), str(shipped), "--json").json
    assert [row["class"] for row in rows] == ["gpu_hardware", "gpu_out_of_memory", "gpu_out_of_memory"]
    assert rows[0]["culprit"] == "gpu 0000:0f:00"


def test_dumps_of_a_hang_share_one_verdict(tmp_path: Path) -> None:
    dumps = sorted((DATA / "flight_recorder" / "lock_gil_1st").glob("dump_*"))
    folder = tmp_path / "dumps"
    folder.mkdir()
    for dump in dumps:
        shutil.copy(dump, folder)
    rows = command("diagnose", str(folder), "--json").json
    assert len(rows) == len(dumps) == 16
    assert {(row["class"], row["culprit"]) for row in rows} == {("hang", "rank 9,14")}


def test_nothing_to_tell(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("step 1 | loss 2.0\n")
    [row] = command("diagnose", str(path), "--json").json
    assert (row["class"], row["confidence"], row["culprit"]) == ("unknown", 0.0, "unknown")
    assert "nothing found" in command("diagnose", str(path)).out
    path.write_bytes(b"\xff\xfe\x00 junk \x00\n")
    assert command("diagnose", str(path)).code == 0


def test_rules_of_an_operator(tmp_path: Path) -> None:
    log, rules = tmp_path / "a.log", tmp_path / "rules.yaml"
    log.write_text("storage gateway said E1234\n")
    rules.write_text("patterns:\n- {id: gateway, regex: said E1234, class: storage, role: root}\n")
    [row] = command("diagnose", str(log), "--rules", str(rules), "--json").json
    assert (row["class"], row["pattern"]) == ("storage", "gateway")


def test_wrong_input(tmp_path: Path) -> None:
    assert "no such file" in refusal("diagnose", str(tmp_path / "none.log"))[0]
    (tmp_path / "empty").mkdir()
    assert "holds no file" in refusal("diagnose", str(tmp_path / "empty"))[0]
    bad = tmp_path / "dump_0.pickle"
    bad.write_bytes(b"\x80\x04K\x01.")
    assert "flight recorder dumps" in refusal("diagnose", str(bad))[0]
    (tmp_path / "a.log").write_text("x\n")
    (tmp_path / "rules.yaml").write_text("patterns: 3\n")
    answer = refusal("diagnose", str(tmp_path / "a.log"), "--rules", str(tmp_path / "rules.yaml"))
    assert "must be a list" in answer[0]
