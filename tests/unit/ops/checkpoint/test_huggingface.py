"""Export and import against transformers, the outside reference."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from jobs.errors import CheckpointError
from jobs.events import Progress
from jobs.exchange import MODEL_PREFIX, hf_config
from jobs.mesh import Mesh
from jobs.models.llama import Llama
from jobs.spec.compare import model_fingerprint
from jobs.spec.model import ModelSpec, MoeSpec, RopeScaling, parameter_shapes
from jobs.state import Chunk
from ops.checkpoint.huggingface import export_huggingface, import_huggingface, read_huggingface
from ops.checkpoint.manifest import Identity
from ops.checkpoint.reader import CheckpointRef, open_checkpoint
from ops.checkpoint.writer import AsyncWriter, Peers
from tests.support.checkpoints import Events, box_chunk, flat_cut, whole


def spec(**changes: object) -> ModelSpec:
    values = {
        "vocab_size": 61, "n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8,
        "d_ff": 48, "max_seq_len": 64, "norm_eps": 1e-5, "rope_theta": 1e4, "init_std": 0.2,
    }  # fmt: skip
    return ModelSpec.model_validate({**values, **changes})


VARIANTS = {
    "gqa": spec(),
    "tied": spec(tie_embeddings=True),
    "mha_wide_heads": spec(n_kv_heads=4, head_dim=16),
    "scaled": spec(rope_scaling=RopeScaling(factor=4.0, original_max_seq_len=16)),
    "mixtral": spec(moe=MoeSpec(n_experts=5, top_k=2, d_ff=24)),
}


def weights(model: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: 0.2 * torch.randn(shape, generator=g) for name, shape in parameter_shapes(model).items()}


def checkpoint(folder: Path, model: ModelSpec, values: dict[str, torch.Tensor]) -> CheckpointRef:
    state = {MODEL_PREFIX + name: t for name, t in values.items()}
    state |= {f"optim/exp_avg/{name}": torch.zeros_like(t) for name, t in values.items()}
    writer = AsyncWriter(folder, Identity(model_fingerprint(model), "native", Mesh()), Peers(), Events())
    writer.save(whole(state), Progress(7))
    assert writer.wait(20)
    return open_checkpoint(folder / "step-00000007")


def empty_chunks(model: ModelSpec) -> tuple[dict[str, torch.Tensor], list[Chunk]]:
    target = {
        MODEL_PREFIX + n: torch.full(shape, float("nan")) for n, shape in parameter_shapes(model).items()
    }
    return target, whole(target)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    words = {"<|endoftext|>": 0, "hello": 1, "world": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_transformers_gives_our_logits(tmp_path: Path, model: ModelSpec) -> None:
    values = weights(model)
    ours = Llama(model)
    ours.load_state_dict(values, strict=True)
    out = export_huggingface(checkpoint(tmp_path / "c", model, values), model, None, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.randint(0, model.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(48).expand(2, -1)
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = ours(tokens, positions, None)
    assert expected.abs().max() > 0.1
    assert (found - expected).abs().max() < 1e-5
    assert theirs.get_input_embeddings().weight.shape == (61, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gqa", "tied", "mixtral"])
@pytest.mark.parametrize("max_file_bytes", [10**9, 20_000])
def test_export_import_export_is_byte_identical(
    tmp_path: Path, name: str, dtype: torch.dtype, max_file_bytes: int, tokenizer_json: Path
) -> None:
    model = VARIANTS[name]
    ref = checkpoint(tmp_path / "c", model, weights(model))
    first = export_huggingface(ref, model, tokenizer_json, tmp_path / "a", dtype, max_file_bytes)
    imported = open_checkpoint(import_huggingface(first, model, tmp_path / "imported"))
    assert imported.step == 0
    second = export_huggingface(
        imported, model, first / "tokenizer.json", tmp_path / "b", dtype, max_file_bytes
    )
    assert contents(first) == contents(second)
    assert (first / "model.safetensors").exists() == (max_file_bytes == 10**9)
    assert (first / "model.safetensors.index.json").exists() == (max_file_bytes != 10**9)
    third = export_huggingface(ref, model, tokenizer_json, tmp_path / "again", dtype, max_file_bytes)
    assert contents(first) == contents(third)
    loaded = LlamaForCausalLM.from_pretrained(first)
    assert loaded.dtype == dtype
    assert not list(tmp_path.glob(".*tmp"))


def test_the_tokenizer_loads_and_names_its_end(tmp_path: Path, tokenizer_json: Path) -> None:
    model = VARIANTS["gqa"]
    out = export_huggingface(
        checkpoint(tmp_path / "c", model, weights(model)), model, tokenizer_json, tmp_path / "o"
    )
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("hello world hello")["input_ids"] == [1, 2, 1]
    assert tokenizer.eos_token == "<|endoftext|>"
    assert LlamaConfig.from_pretrained(out).eos_token_id == 0
    beside = tokenizer_json.with_name("tokenizer_config.json")
    beside.write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "world"}')
    again = export_huggingface(
        open_checkpoint(tmp_path / "c" / "step-00000007"), model, tokenizer_json, tmp_path / "p"
    )
    assert LlamaConfig.from_pretrained(again).eos_token_id == 2


def test_a_model_saved_by_transformers_is_read(tmp_path: Path) -> None:
    model = VARIANTS["scaled"]
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**hf_config(model)))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    target, chunks = empty_chunks(model)
    read_huggingface(tmp_path / "theirs", chunks, model)
    for name, parameter in theirs.named_parameters():
        ours = MODEL_PREFIX + (name if name == "lm_head.weight" else name.removeprefix("model."))
        assert torch.equal(target[ours], parameter)


def test_a_mixtral_saved_by_transformers_gives_its_logits(tmp_path: Path) -> None:
    model = VARIANTS["mixtral"]
    torch.manual_seed(0)
    theirs = MixtralForCausalLM(MixtralConfig(**hf_config(model))).eval()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    target, chunks = empty_chunks(model)
    read_huggingface(tmp_path / "theirs", chunks, model)
    ours = Llama(model)
    ours.load_state_dict({name.removeprefix(MODEL_PREFIX): t for name, t in target.items()}, strict=True)
    tokens = torch.randint(0, model.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens, torch.arange(48).expand(2, -1), None)
    assert expected.abs().max() > 0.1
    assert (found - expected).abs().max() < 1e-5


def test_only_boxes_of_a_rank_are_filled_and_the_rest_is_left_alone(tmp_path: Path) -> None:
    model = VARIANTS["gqa"]
    values = weights(model)
    out = export_huggingface(checkpoint(tmp_path / "c", model, values), model, None, tmp_path / "out")
    state = {MODEL_PREFIX + name: t for name, t in values.items()}
    zeros = {name: torch.zeros_like(t) for name, t in state.items()}
    moments = box_chunk("optim/exp_avg/norm.weight", torch.full((32,), 5.0), ((0,), (32,)))
    chunks = flat_cut(zeros, 1, 3)
    read_huggingface(out, [*chunks, moments], model)
    for found, expected in zip(chunks, flat_cut(state, 1, 3), strict=True):
        assert torch.equal(found.tensor, expected.tensor)
    assert torch.equal(moments.tensor, torch.full((32,), 5.0))


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    model = VARIANTS["gqa"]
    return export_huggingface(
        checkpoint(tmp_path / "c", model, weights(model)), model, None, tmp_path / "out"
    )


def test_tensors_that_do_not_fit_are_all_listed_and_nothing_changes(exported: Path) -> None:
    file = exported / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.zeros(31)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    del tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, file)
    target, chunks = empty_chunks(VARIANTS["gqa"])
    with pytest.raises(CheckpointError) as caught:
        read_huggingface(exported, chunks, VARIANTS["gqa"])
    text = str(caught.value)
    assert "lm_head.weight is missing" in text
    assert "q_proj.bias is no tensor of this model" in text
    assert "model.norm.weight has shape [31], expected [32]" in text
    assert "inv_freq" not in text
    assert all(t.isnan().all() for t in target.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_model": 64}, "d_model is 32 in the checkpoint and 64 in this run"),
        ({"rope_theta": 5e5}, "rope_theta is 10000.0"),
        ({"norm_eps": 1e-6}, "norm_eps"),
        ({"tie_embeddings": True}, "tie_embeddings"),
        ({"n_kv_heads": 4}, "n_kv_heads"),
        ({"rope_scaling": RopeScaling()}, "rope_scaling"),
    ],
)
def test_weights_of_another_model_are_refused(exported: Path, changes: dict[str, object], words: str) -> None:
    other = spec(**changes)
    with pytest.raises(CheckpointError, match=words):
        read_huggingface(exported, empty_chunks(other)[1], other)


def test_a_tied_folder_may_hold_the_head_twice_but_not_two_heads(tmp_path: Path) -> None:
    model = VARIANTS["tied"]
    values = weights(model)
    out = export_huggingface(checkpoint(tmp_path / "c", model, values), model, None, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "lm_head.weight": values["embed_tokens.weight"].clone()}, out / "model.safetensors")
    target, chunks = empty_chunks(model)
    read_huggingface(out, chunks, model)
    assert torch.equal(target["model/embed_tokens.weight"], values["embed_tokens.weight"])
    save_file({**tensors, "lm_head.weight": values["embed_tokens.weight"] + 1}, out / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        read_huggingface(out, chunks, model)


def test_folders_without_the_files_are_refused(tmp_path: Path, exported: Path) -> None:
    model = VARIANTS["gqa"]
    _, chunks = empty_chunks(model)
    with pytest.raises(CheckpointError, match=r"no config.json"):
        read_huggingface(tmp_path, chunks, model)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(exported / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="only safetensors are read"):
        read_huggingface(pickled, chunks, model)
    (exported / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_huggingface(exported, chunks, model)


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    model = VARIANTS["gqa"]
    ref = checkpoint(tmp_path / "c", model, weights(model))
    out = export_huggingface(ref, model, None, tmp_path / "out", max_file_bytes=20_000)
    path = out / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model.norm.weight is not in model-00001"):
        read_huggingface(out, empty_chunks(model)[1], model)


def test_export_refuses_a_used_folder_and_another_model(tmp_path: Path) -> None:
    model = VARIANTS["gqa"]
    ref = checkpoint(tmp_path / "c", model, weights(model))
    (tmp_path / "used").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        export_huggingface(ref, model, None, tmp_path / "used")
    with pytest.raises(
        CheckpointError, match=r"rope_theta is 10000\.0 in the checkpoint and 500000\.0 in this run"
    ):
        export_huggingface(ref, spec(rope_theta=5e5), None, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(CheckpointError, match=r"not a tokenizer.json"):
        export_huggingface(ref, model, broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_import_refuses_to_overwrite(tmp_path: Path, exported: Path) -> None:
    model = VARIANTS["gqa"]
    import_huggingface(exported, model, tmp_path / "i")
    with pytest.raises(CheckpointError, match="exists"):
        import_huggingface(exported, model, tmp_path / "i")
