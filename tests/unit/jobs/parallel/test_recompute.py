"""Recomputation changes no bit of a gradient, and keeps less."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jobs.mesh import Mesh
from jobs.models.init import build_llama
from jobs.models.operations import Operations
from jobs.parallel.recompute import recompute_operations
from jobs.parallel.tensor import tensor_operations
from jobs.spec.model import MoeSpec
from tests.support.layouts import gradients, local_model
from tests.support.ranks import run_ranks
from tests.support.tiny_runs import tiny_model, whole_batch

CPU = torch.device("cpu")
MOE = MoeSpec(
    n_experts=4,
    top_k=2,
    d_ff=24,
    n_shared_experts=1,
    router="sigmoid",
    balance_loss_coef=0.1,
    bias_update_rate=0.1,
)
MODELS = {"dense": tiny_model(), "tied": tiny_model(tie_embeddings=True), "experts": tiny_model(moe=MOE)}
MODES = ["attention", "ops", "full"]


class LiveBytes(TorchDispatchMode):
    """Bytes of what operators made and somebody still holds, the model's own memory left out."""

    def __init__(self, model) -> None:
        super().__init__()
        self._made = {}
        self._known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return out

    @property
    def total(self) -> int:
        return sum(
            size
            for place, (storage, size) in self._made.items()
            if place not in self._known and not storage.expired()
        )


def forward_and_backward(model):
    """Loss, gradients, router loads, bytes kept between forward and backward."""
    batch = whole_batch(0)
    live = LiveBytes(model)
    with live:
        loss = model.operations.loss(model(batch.tokens, batch.positions, batch.document_ids), batch.labels)
    kept = live.total
    loss.backward()
    loads = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("load")]
    return loss.detach(), gradients(model), loads, kept


def assert_bitwise_equal(result, expected):
    assert torch.equal(result[0], expected[0])
    assert result[1].keys() == expected[1].keys()
    assert all(torch.equal(result[1][name], expected[1][name]) for name in expected[1])
    assert len(result[2]) == len(expected[2])
    assert all(torch.equal(*loads) for loads in zip(result[2], expected[2], strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS.keys())
def test_gradients_are_bitwise_equal(spec, mode):
    plain = build_llama(spec, 0, CPU)
    recomputed = build_llama(spec, 0, CPU, operations=recompute_operations(Operations(), mode))
    assert_bitwise_equal(forward_and_backward(recomputed), forward_and_backward(plain))


def kept_bytes(mode, n_layers):
    operations = recompute_operations(Operations(), mode)
    return forward_and_backward(build_llama(tiny_model(n_layers=n_layers), 0, CPU, operations=operations))[3]


def test_a_layer_keeps_less():
    """A layer more costs: full its input only; ops less than three quarters; attention no more than none."""
    none, attention, ops, full = (kept_bytes(mode, 3) - kept_bytes(mode, 2) for mode in ("none", *MODES))
    layer_input = whole_batch(0).tokens.numel() * tiny_model().d_model * 4
    assert full == layer_input
    assert full < ops < 0.75 * none
    assert attention < none


def on_tensor_ranks(groups, spec, mode, sequence_parallel):
    results = []
    for chosen in ("none", mode):
        operations = tensor_operations(Operations(), groups.tp, sequence_parallel)
        model, _ = local_model(
            spec,
            groups.mesh,
            groups,
            recompute_operations(operations, chosen),
            sequence_parallel=sequence_parallel,
            dtype=torch.float32,
        )
        results.append(forward_and_backward(model)[:3])
    return results


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_bitwise_equal_on_tensor_ranks(mode, sequence_parallel, tmp_path):
    for plain, recomputed in run_ranks(
        on_tensor_ranks, Mesh(tp=2), tmp_path, tiny_model(), mode, sequence_parallel
    ):
        assert_bitwise_equal(recomputed, plain)
