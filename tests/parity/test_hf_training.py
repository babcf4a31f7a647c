"""Packtrain against transformers, from outside: weights by file, tokens by `data peek`, losses by metrics.

The other side is LlamaForCausalLM, torch.optim.AdamW and a loop written here; nothing of jobs takes part in
it but the learning rate of a step.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jobs.models.init import build_llama
from jobs.models.llama import Llama
from jobs.optim.schedule import lr_at
from jobs.spec.job import JobSpec
from jobs.spec.load import load_spec
from ops.checkpoint.reader import open_checkpoint, read_tensor
from ops.ledger import read_metrics
from service.fork_client import ForkServer
from service.run_store import RUNNING
from tests.support.commands import command
from tests.support.one_rank import run_one_rank, start_server
from tests.support.stored_runs import stopped_run

pytestmark = pytest.mark.parity
STEPS, SEQ_LEN = 20, 48

SPEC = """\
model: {hf_config: start}
data:
  sources: [{kind: text, path: corpus.txt, separator: "\\n%\\n"}]
  tokenizer: {kind: bytes}
  seq_len: 48
  packing: PACKING
  mask_documents: MASKED
  validation_frac: 0.0
optim: {lr: 3e-3, weight_decay: 0.1, grad_clip_norm: 0.5, schedule: {kind: cosine, warmup_steps: 5}}
train: {steps: 20, global_batch_size: 6, micro_batch_size: 3, init_from: start}
run: {name: ours, storage: runs, seed: 3}
tracking: {mlflow: false, peak_tflops: 1.0}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    made = start_server(tmp_path_factory.mktemp("server"))
    yield made
    made.close()


def their_model(*, tied: bool) -> LlamaForCausalLM:
    """Another library's random weights: grouped-query attention, wide enough that gradients are not noise."""
    torch.manual_seed(12)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


def said(*words: str) -> str:
    answer = command(*words)
    assert answer.code == 0, answer
    return answer.out


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_corpus(folder: Path) -> None:
    """Documents of 1 to about 90 letters; every letter is met in the first steps."""
    words = ["alpha", "beta", "gamma", "delta", "pi", "x", "rho sigma tau", "omega"]
    documents = [" ".join(words[(i * k) % 8] for k in range(1, 2 + i % 11)) for i in range(400)]
    (folder / "corpus.txt").write_text("\n%\n".join(documents))


@pytest.mark.parametrize("tied", [False, True])
def test_weights_go_in_and_out_by_the_command_line_byte_for_byte(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = their_model(tied=tied)
    theirs.save_pretrained("theirs")
    for number in (1, 2):
        source = "theirs" if number == 1 else "export1"
        said("checkpoint", "import", source, f"import{number}")
        assert "good" in said("checkpoint", "verify", f"import{number}")
        said("checkpoint", "export", f"import{number}", f"export{number}")
    assert files(tmp_path / "export1") == files(tmp_path / "export2")
    ours = LlamaForCausalLM.from_pretrained("export2", attn_implementation="eager")
    tokens = torch.arange(257)[None, :64]
    with torch.no_grad():
        difference = (ours(tokens).logits - theirs(tokens).logits).abs().max()
    assert difference == 0.0
    names = set(files(tmp_path / "export1"))
    assert {"model.safetensors", "config.json"} <= names


class TheirLoop:
    """Plain torch: the model, AdamW that decays matrices only, clipping, the mean over labelled tokens."""

    def __init__(self, folder: str, *, masked: bool) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
        self._masked = masked
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)

    def step(self, seen: dict[str, Any], lr: float) -> tuple[float, float]:
        """Loss and gradient norm of one step on what `data peek` shows."""
        tokens, labels = torch.tensor(seen["tokens"]), torch.tensor(seen["labels"])
        more = self._documents(seen["documents"]) if self._masked else {}
        logits = self.model(tokens, **more).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item(), norm.item()

    def _documents(self, documents: list[list[dict[str, int]]]) -> dict[str, torch.Tensor]:
        """Positions restart at each document, and no attention leaves it: [B, 1, S, S] added to scores."""
        ids = torch.full((len(documents), SEQ_LEN), -1)
        positions = torch.arange(SEQ_LEN).repeat(len(documents), 1)
        for row, parts in enumerate(documents):
            for number, part in enumerate(parts):
                slots = slice(part["slot"], part["slot"] + part["n_tokens"])
                ids[row, slots] = number
                positions[row, slots] = torch.arange(part["n_tokens"])
        may = (ids[:, :, None] == ids[:, None, :]) & torch.ones(SEQ_LEN, SEQ_LEN).tril().bool()
        scores = torch.zeros(may.shape).masked_fill(~may, torch.finfo(torch.float32).min)
        return {"position_ids": positions, "attention_mask": scores[:, None]}


@pytest.mark.parametrize(
    ("packing", "masked", "tied"),
    [("concat", False, False), ("concat", True, True), ("pad", True, False)],
)
def test_a_transformers_model_on_the_same_tokens_follows_the_same_losses(
    packing: str,
    masked: bool,
    tied: bool,
    server: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    their_model(tied=tied).save_pretrained("theirs")
    said("checkpoint", "import", "theirs", "imported")
    said("checkpoint", "export", "imported", "start")
    (tmp_path / "spec.yaml").write_text(
        SPEC.replace("PACKING", packing).replace("MASKED", "true" if masked else "false")
    )
    spec = load_spec("spec.yaml")

    run_dir = stopped_run(tmp_path / "spec.yaml", (), status=RUNNING)
    assert run_one_rank(server, run_dir).outcome == "finished"
    records = [record for record in read_metrics(run_dir) if "grad_norm" in record]

    loop = TheirLoop("start", masked=masked)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        seen = command("data", "peek", "spec.yaml", "--step", str(step), "--json").json
        loss, norm = loop.step(seen, lr_at(spec.optim, STEPS, step - 1))
        losses.append(loss)
        norms.append(norm)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["loss"] for record in records] == pytest.approx(losses, abs=2e-5)
    assert [record["grad_norm"] for record in records] == pytest.approx(norms, abs=1e-4)
    assert losses[-1] < losses[0] - 1.0

    said("checkpoint", "export", str(run_dir), "trained")
    trained = LlamaForCausalLM.from_pretrained("trained", attn_implementation="eager").eval()
    tokens = torch.tensor(seen["tokens"])
    with torch.no_grad():
        exported, theirs = trained(tokens).logits, loop.model.eval()(tokens).logits
        ours = our_model(spec, run_dir)(tokens, torch.arange(SEQ_LEN).expand_as(tokens), None)
    assert (exported - ours).abs().max() < 1e-5
    # 1e-4 is promised; the two sides differ by roundings alone, about 1e-6 after 20 steps.
    assert (exported - theirs).abs().max() < 1e-4
    for (name, parameter), other in zip(trained.named_parameters(), loop.model.parameters(), strict=True):
        torch.testing.assert_close(
            parameter, other, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def our_model(spec: JobSpec, run_dir: Path) -> Llama:
    """The last checkpoint's weights in our own model, not by way of an export."""
    found = open_checkpoint(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    model = build_llama(spec.model, seed=0, device=torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read_tensor(found, f"model/{name}"))
    return model
