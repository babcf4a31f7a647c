"""Layouts that went wrong in public reports: the right behaviour, with real ranks, files and weights."""

from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jobs.comm.groups import Groups
from jobs.engines.build import build_engine
from jobs.parallel.placement import place_parameters
from jobs.parity.batches import global_batch, n_valid_tokens
from jobs.parity.rank import train_step
from jobs.planner.legality import refusals
from jobs.planner.stages import plan_stages
from jobs.spec.job import JobSpec
from jobs.spec.model import parameter_shapes
from ops.checkpoint.huggingface import export_huggingface, read_huggingface
from ops.checkpoint.reader import find_newest, load_into
from tests.support.parity_runs import DENSE, MOE, launch, layout_spec, save

pytestmark = [pytest.mark.parity, pytest.mark.timeout(120)]
CPU = torch.device("cpu")


def reasons(spec: JobSpec) -> str:
    return "\n".join(str(refusal) for refusal in refusals(spec))


# -------------------------------------------- deepspeedai/DeepSpeed#6589, pytorch/torchtitan#4258

SIX = MOE["moe"] | {"n_experts": 6, "n_shared_experts": 0, "n_dense_layers": 0}
SIX_EXPERTS = MOE | {"n_layers": 1, "moe": SIX}


def save_numbered_experts(groups: Groups, spec: JobSpec, folder: str) -> None:
    """Every weight of expert e is e."""
    engine = build_engine(spec, groups, CPU)
    for chunk in engine.chunks():
        if ".experts." in chunk.name:
            chunk.tensor.fill_(float(chunk.name.split(".experts.")[1].split(".")[0]))
    save(groups, engine, spec, folder, 1)


def experts_read(groups: Groups, spec: JobSpec, folder: str) -> set[tuple[int, float]]:
    """Global number and value of the experts that this rank holds after the import."""
    engine = build_engine(spec, groups, CPU)
    read_huggingface(Path(folder), engine.chunks(), spec.model)
    return {
        (int(chunk.name.split(".experts.")[1].split(".")[0]), value)
        for chunk in engine.chunks()
        if chunk.name.startswith("model/") and ".experts." in chunk.name
        for value in chunk.tensor.unique().tolist()
    }


def test_each_expert_rank_reads_its_own_slice_of_a_plain_file(tmp_path: Path) -> None:
    one = layout_spec({"dp": 1}, SIX_EXPERTS)
    launch(save_numbered_experts, one, tmp_path, str(tmp_path / "checkpoints"))
    ref = find_newest(tmp_path / "checkpoints", lambda *_: None)
    assert ref is not None
    folder = str(export_huggingface(ref, one.model, None, tmp_path / "plain"))
    for ep in (2, 3):
        spec = layout_spec({"dp": ep, "ep": ep}, SIX_EXPERTS)
        for rank, held in enumerate(launch(experts_read, spec, tmp_path, folder)):
            own = range(6 // ep * rank, 6 // ep * (rank + 1))
            assert held == {(expert, float(expert)) for expert in own}


def test_experts_that_do_not_divide_are_refused() -> None:
    assert "6 experts cannot be split over ep=4" in reasons(layout_spec({"dp": 4, "ep": 4}, SIX_EXPERTS))


# -------------------------------------------- NVIDIA/Megatron-LM#1304, ml-explore/mlx-lm#1688


@pytest.mark.parametrize(("n_layers", "pp"), [(30, 4), (6, 4), (10, 3)])
def test_no_layer_is_lost_between_stages(n_layers: int, pp: int) -> None:
    spec = layout_spec({"pp": pp}, {"n_layers": n_layers}, accum=pp)
    assert refusals(spec) == []
    stages = plan_stages(spec.model, pp)
    held = [
        place_parameters(spec.model, spec.strategy.mesh, rank, stages, sequence_parallel=True)
        for rank in range(pp)
    ]
    assert sum(prod(p.shape) for placed in held for p in placed.values()) == spec.model.n_params


def count_built(groups: Groups, spec: JobSpec) -> int:
    return sum(parameter.numel() for parameter in build_engine(spec, groups, CPU).model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_the_built_model_has_as_many_parameters_as_the_formula(tied: bool, tmp_path: Path) -> None:
    spec = layout_spec({"pp": 2, "tp": 2}, {"n_layers": 5, "vocab_size": 67, "tie_embeddings": tied}, accum=2)
    built = sum(launch(count_built, spec, tmp_path))
    norms = (2 * spec.model.n_layers + 1) * spec.model.d_model  # whole on both tp ranks
    copies = spec.model.vocab_size * spec.model.d_model if tied else 0  # on the first and the last stage
    assert built == spec.model.n_params + norms + copies


# -------------------------------------------- hpcaitech/ColossalAI#6167, NVIDIA-NeMo/Megatron-Bridge#1331


def step_and_save(groups: Groups, spec: JobSpec, folder: str) -> float:
    engine = build_engine(spec, groups, CPU)
    result = train_step(engine, spec, groups, 0)
    save(groups, engine, spec, folder, 1)
    return result.loss


def load_whole(groups: Groups, spec: JobSpec, folder: str) -> int:
    engine = build_engine(spec, groups, CPU)
    ref = find_newest(Path(folder), lambda *_: None)
    assert ref is not None
    load_into(ref, engine.chunks())
    return groups.rank


@pytest.mark.parametrize(("vocab_size", "tp"), [(511, 2), (514, 4)])
def test_a_vocabulary_that_tp_does_not_divide_is_never_padded_outside(
    vocab_size: int, tp: int, tmp_path: Path
) -> None:
    model = {"vocab_size": vocab_size, "n_layers": 1}
    folder = str(tmp_path / "checkpoints")
    losses = launch(step_and_save, layout_spec({"tp": tp}, model), tmp_path, folder)
    alone = launch(step_and_save, layout_spec({}, model), tmp_path, str(tmp_path / "alone"))
    assert losses == pytest.approx(alone * tp, abs=1e-6)
    launch(load_whole, layout_spec({}, model), tmp_path, folder)
    ref = find_newest(Path(folder), lambda *_: None)
    assert ref is not None
    out = export_huggingface(ref, layout_spec({}, model).model, None, tmp_path / "plain")
    weights = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
    assert weights["model.embed_tokens.weight"].shape == (vocab_size, DENSE["d_model"])
    assert weights["lm_head.weight"].shape == (vocab_size, DENSE["d_model"])


# -------------------------------------------- pytorch/torchtitan#2574, huggingface/transformers#48307


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "tp", "legal"),
    [(14, 2, 4, {1, 2}), (28, 4, 8, {1, 2, 4})],
    ids=["Qwen2.5-0.5B at tp 4", "Qwen2.5-7B at tp 8"],
)
def test_heads_that_tp_does_not_divide_are_refused_with_sizes_that_work(
    n_heads: int, n_kv_heads: int, tp: int, legal: set[int]
) -> None:
    model = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "d_ff": 64}
    found = refusals(layout_spec({"tp": tp}, model))
    assert f"{n_heads} attention heads do not divide over tp={tp} ranks" in found[0].reason
    assert found[0].layout is not None
    assert found[0].layout.tp in legal
    assert {n for n in (1, 2, 4, 8) if not refusals(layout_spec({"tp": n}, model))} == legal


# -------------------------------------------- deepspeedai/DeepSpeed#5177, axolotl-ai-cloud/axolotl#3498


def test_a_sequence_that_cp_does_not_divide_is_refused() -> None:
    assert "30" in reasons(layout_spec({"cp": 4}, seq_len=30))


def tokens_in_the_loss(groups: Groups, spec: JobSpec) -> int:
    return build_engine(spec, groups, CPU).evaluate(global_batch(spec, 0))[1]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_each_token_of_a_cut_sequence_enters_the_loss_once(cp: int, tmp_path: Path) -> None:
    spec = layout_spec({"cp": cp}, n_sequences=2, mask_documents=False)
    batch = global_batch(spec, 0)
    assert launch(tokens_in_the_loss, spec, tmp_path) == [n_valid_tokens(batch)] * cp


# -------------------------------------------- pytorch/torchtitan#775


def one_step(groups: Groups, spec: JobSpec) -> float:
    return train_step(build_engine(spec, groups, CPU), spec, groups, 0).loss


@pytest.mark.parametrize(("pp", "n_micro_batches"), [(4, 2), (2, 1)])
def test_fewer_micro_batches_than_stages_train_or_are_refused(
    pp: int, n_micro_batches: int, tmp_path: Path
) -> None:
    assert f"{n_micro_batches}" in reasons(layout_spec({"pp": pp}, accum=n_micro_batches))
    spec = layout_spec({"pp": pp, "pipeline": {"schedule": "gpipe"}}, accum=n_micro_batches)
    assert refusals(spec) == []
    losses = launch(one_step, spec, tmp_path)
    alone = launch(one_step, layout_spec({}, accum=n_micro_batches), tmp_path)
    assert losses == pytest.approx(alone * pp, abs=1e-6)


def test_the_names_are_those_of_the_formula() -> None:
    """Pieces of all ranks together are the whole parameters, under their global names."""
    spec = layout_spec({"dp": 2, "tp": 2, "pp": 2, "ep": 2}, MOE | {"n_layers": 4}, accum=2)
    stages = plan_stages(spec.model, 2)
    held = [
        place_parameters(spec.model, spec.strategy.mesh, rank, stages, sequence_parallel=True)
        for rank in range(8)
    ]
    assert {name for placed in held for name in placed} == set(parameter_shapes(spec.model))
