"""Routed experts against the textbook: every token by itself, in fp64, with the losses written out."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import jobs.models.moe
from jobs.models.experts import grouped_swiglu, sort_by_expert, spread
from jobs.models.init import build_llama
from jobs.models.moe import Moe, Router, within_capacity
from jobs.models.operations import Operations
from jobs.models.router_losses import RouterLossScale
from jobs.parallel.recompute import recompute_operations
from jobs.spec.model import MoeSpec
from tests.support.tiny_runs import tiny_model

B, S, D, E, K = 3, 10, 8, 6, 2
CPU = torch.device("cpu")
SCALE = RouterLossScale(global_batch_size=B, seq_len=S)
VARIANTS = {
    "mixtral": {},
    "weights as they are": {"normalize_weights": False, "routed_scale": 2.5},
    "deepseek": {"router": "sigmoid", "bias_update_rate": 0.1, "n_shared_experts": 2, "routed_scale": 1.5},
    "losses": {"balance_loss_coef": 0.4, "z_loss_coef": 0.3},
    "sigmoid losses": {
        "router": "sigmoid", "bias_update_rate": 0.1, "balance_loss_coef": 0.4, "z_loss_coef": 0.3,
    },
    "capacity": {"capacity_factor": 0.6},
    "one choice": {"top_k": 1, "normalize_weights": False, "capacity_factor": 0.5},
}  # fmt: skip


def moe_spec(**changes):
    return MoeSpec(**({"n_experts": E, "top_k": K, "d_ff": 5} | changes))


def layer(spec, scale=SCALE, seed=0):
    torch.manual_seed(seed)
    moe = Moe(D, spec, Operations(router_losses=scale), range(spec.n_experts)).double()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    if moe.gate.has_bias:
        moe.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, spec.n_experts))
    return moe


def inputs(seed=1):
    return torch.randn(B, S, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def swiglu(x, network):
    return network.down_proj(F.silu(network.gate_proj(x)) * network.up_proj(x))


def textbook(moe, x):
    """Output, and the sum of the router's losses: arXiv 2412.19437, eq. 12 to 20, one token at a time."""
    spec = moe.moe
    bias = moe.gate.e_score_correction_bias.double() if moe.gate.has_bias else torch.zeros(spec.n_experts)
    outputs, extra = [], torch.zeros((), dtype=torch.float64)
    for sequence in x:
        logits = [moe.gate.weight @ token for token in sequence]
        scores = [z.softmax(0) if spec.router == "softmax" else z.sigmoid() for z in logits]
        chosen = [(s + bias).argsort(descending=True)[: spec.top_k].tolist() for s in scores]
        weights = []
        for s, picked in zip(scores, chosen, strict=True):
            total = sum(s[e] for e in picked) if spec.normalize_weights else 1.0
            weights.append({e: spec.routed_scale * s[e] / total for e in picked})
        for e in range(spec.n_experts):
            if spec.capacity_factor is not None:
                limit = math.ceil(spec.capacity_factor * len(sequence) * spec.top_k / spec.n_experts)
                queue = sorted(
                    (t for t, w in enumerate(weights) if e in w), key=lambda t: -weights[t][e].item()
                )
                for t in queue[limit:]:
                    del weights[t][e]
        outputs.append([])
        for token, w in zip(sequence, weights, strict=True):
            out = sum((w[e] * swiglu(token, moe.experts[str(e)]) for e in w), torch.zeros_like(token))
            if spec.n_shared_experts:
                out = out + swiglu(token, moe.shared_experts)
            outputs[-1].append(out)
        shares = torch.stack([s / s.sum() for s in scores])
        highest = torch.zeros(spec.n_experts, dtype=torch.float64)
        for s in scores:
            highest[s.argsort(descending=True)[: spec.top_k]] += 1
        f = spec.n_experts / (spec.top_k * len(sequence)) * highest
        extra = extra + spec.balance_loss_coef * (f * shares.mean(0)).sum() / len(x)
        squares = torch.stack([z.exp().sum().log().square() for z in logits])
        extra = extra + spec.z_loss_coef * squares.mean() / len(x)
    return torch.stack([torch.stack(rows) for rows in outputs]), extra


def gradients_of(moe, x, loss):
    return dict(
        zip(
            ["x", *(name for name, _ in moe.named_parameters())],
            torch.autograd.grad(loss, [x, *moe.parameters()], materialize_grads=True),
            strict=True,
        )
    )


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_output_and_gradients_equal_the_textbook(changes):
    moe, x = layer(moe_spec(**changes)), inputs().requires_grad_()
    probe = inputs(seed=2)
    out = moe(x)
    found = gradients_of(moe, x, (out * probe).sum())
    expected_out, extra = textbook(moe, x)
    expected = gradients_of(moe, x, (expected_out * probe).sum() + extra)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-12, msg=name)


def test_losses_enter_the_gradient_by_their_factor_and_not_the_output():
    changes = {"balance_loss_coef": 0.4, "z_loss_coef": 0.3}
    x = inputs()
    without = layer(moe_spec(**changes), scale=None)
    gradients = {}
    for factor in (1.0, 2.0):
        moe = layer(moe_spec(**changes), RouterLossScale(B, S, factor))
        out = moe(x)
        assert torch.equal(out, without(x))
        out.sum().backward()
        gradients[factor] = moe.gate.weight.grad
    without(x).sum().backward()
    plain = without.gate.weight.grad
    torch.testing.assert_close(gradients[2.0] - plain, 2 * (gradients[1.0] - plain), rtol=1e-11, atol=1e-13)
    assert (gradients[1.0] - plain).abs().max() > 1e-3


def test_micro_batches_give_the_gradient_of_the_global_batch():
    spec, x = moe_spec(**VARIANTS["sigmoid losses"], capacity_factor=0.7), inputs()
    whole, parts = layer(spec), layer(spec)
    whole(x).square().sum().backward()
    for row in x:
        parts(row[None]).square().sum().backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(
            parts.get_parameter(name).grad, parameter.grad, rtol=1e-11, atol=1e-12, msg=name
        )
    assert torch.equal(whole.gate.load, parts.gate.load)
    assert whole.gate.load.sum() == B * S * K


def test_the_bias_selects_and_weighs_nothing():
    """A bias that is equal for all changes nothing; one that is not changes choices, not their weights."""
    moe, x = layer(moe_spec(router="sigmoid", bias_update_rate=0.1, normalize_weights=False)), inputs()
    moe.gate.e_score_correction_bias.zero_()
    plain = moe(x)
    moe.gate.e_score_correction_bias.fill_(5.0)
    torch.testing.assert_close(moe(x), plain, rtol=1e-12, atol=1e-12)
    moe.gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0, 0, 0, 0]))
    scores = moe.gate(x).sigmoid()
    both = sum(scores[..., e, None] * swiglu(x, moe.experts[str(e)]) for e in (0, 1))
    torch.testing.assert_close(moe(x), both, rtol=1e-12, atol=1e-12)


def test_experts_without_a_token_have_a_zero_gradient():
    moe = layer(moe_spec(router="sigmoid", bias_update_rate=0.1))
    moe.gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0, 0, 0, 0]))
    moe(inputs()).sum().backward()
    for number, expert in moe.experts.items():
        for parameter in expert.parameters():
            assert parameter.grad is not None
            assert bool(parameter.grad.any()) == (number in "01")


def test_capacity_takes_the_heaviest_and_of_equal_ones_the_earlier():
    chosen = torch.tensor([[[0, 1], [0, 1], [1, 0], [0, 2]]])
    weights = torch.tensor([[[0.5, 0.5], [0.5, 0.9], [0.2, 0.8], [0.5, 0.1]]])
    accepted = within_capacity(chosen, weights, 3, capacity=2)
    assert accepted.tolist() == [[[True, True], [False, True], [False, True], [False, True]]]
    assert within_capacity(chosen, weights, 3, capacity=4).all()


def test_capacity_is_of_each_sequence():
    chosen = torch.zeros(2, 3, 1, dtype=torch.int64)
    weights = torch.tensor([[[0.1], [0.2], [0.3]], [[0.6], [0.5], [0.4]]])
    accepted = within_capacity(chosen, weights, 2, capacity=1)
    assert accepted[..., 0].tolist() == [[False, False, True], [True, False, False]]


def run_plain(moe, x):
    moe(x).sum().backward()


def run_recomputed(moe, x, *, use_reentrant):
    checkpoint(moe, x, use_reentrant=use_reentrant).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_step_under_recomputation_counts_tokens_once_and_takes_the_losses_once(use_reentrant):
    spec, x = moe_spec(**VARIANTS["sigmoid losses"]), inputs().requires_grad_()
    plain, recomputed = layer(spec), layer(spec)
    run_plain(plain, x)
    run_recomputed(recomputed, x, use_reentrant=use_reentrant)
    assert torch.equal(plain.gate.load, recomputed.gate.load)
    assert plain.gate.load.sum() == B * S * K
    torch.testing.assert_close(plain.gate.weight.grad, recomputed.gate.weight.grad, rtol=1e-12, atol=1e-13)


def test_counting_in_the_forward_pass_would_count_twice(monkeypatch):
    """The test above notices it: this is the naive way."""

    def count_at_once(out, loss, factor, counts, load):
        load += counts
        return out

    monkeypatch.setattr(jobs.models.moe, "attach", count_at_once)
    moe = layer(moe_spec(**VARIANTS["sigmoid losses"]))
    run_recomputed(moe, inputs().requires_grad_(), use_reentrant=True)
    assert moe.gate.load.sum() == 2 * B * S * K


class ProductCounter(TorchDispatchMode):
    """Counts the calls of some operators; at first, the products of experts in the forward pass."""

    def __init__(self, *operators):
        super().__init__()
        self.operators = operators or (torch.ops.jobs.grouped_swiglu_products.default,)
        self.n_calls = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.n_calls += operator in self.operators
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "n_calls"), [("ops", 2), ("full", 4)])
def test_recomputation_of_all_but_products_keeps_those_of_experts(mode, n_calls):
    """One operator makes gate, up and down of a layer; there are two layers."""
    operations = recompute_operations(Operations(), mode)
    model = build_llama(tiny_model(moe=moe_spec()), 0, CPU, operations=operations)
    tokens = torch.arange(S)[None]
    with ProductCounter() as counter:
        model(tokens, tokens, None).sum().backward()
    assert counter.n_calls == n_calls


def test_evaluation_counts_nothing():
    moe = layer(moe_spec(**VARIANTS["deepseek"]))
    with torch.no_grad():
        moe(inputs())
    assert not moe.gate.load.any()


def test_biases_stay_fp32_and_begin_at_zero_on_the_parameters_device():
    spec = tiny_model(moe=moe_spec(router="sigmoid", bias_update_rate=1e-3))
    model = build_llama(spec, 0, CPU, torch.bfloat16)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    assert len(routers) == 2
    for router in routers:
        router.e_score_correction_bias += 1.001
    model.to(torch.bfloat16)
    for router in routers:
        assert router.weight.dtype == torch.bfloat16
        assert router.e_score_correction_bias.dtype == torch.float32
        assert torch.equal(router.e_score_correction_bias, torch.full((E,), 1.001))


def test_the_router_computes_in_fp32():
    """Scores of a bf16 model are those of its rounded weights in fp32: bf16 sums would choose others."""
    seen = []

    def experts(x, chosen, weights, matrices):
        seen.append(weights)
        return torch.zeros_like(x)

    moe = Moe(D, moe_spec(), Operations(experts=experts), range(E)).to(torch.bfloat16)
    x = inputs().bfloat16()
    moe(x)
    exact = F.linear(x.float(), moe.gate.weight.float()).softmax(-1).topk(K).values
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(
        seen[0], (exact / exact.sum(-1, keepdim=True)).flatten(0, 1), rtol=1e-6, atol=0
    )


def test_grouped_products_have_the_right_gradients():
    generator = torch.Generator().manual_seed(0)
    rows, *matrices = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((5, 3), *((4, 3), (4, 3), (3, 4)) * 3)
    )
    experts = [tuple(matrices[i : i + 3]) for i in (0, 3, 6)]

    def grouped(rows, *_):
        return grouped_swiglu(rows, [2, 0, 3], experts)

    torch.autograd.gradcheck(grouped, (rows, *matrices))


@pytest.mark.parametrize(("wanted", "n_products"), [("all", 2 * 9), ("rows", 9), ("matrices", 9 + 3)])
def test_a_backward_pass_taken_apart_computes_what_its_part_needs(wanted, n_products):
    """Of three experts' gate, up and down: the matrices' gradients need the gradient of down's rows too."""
    rows, *matrices = (
        torch.randn(shape, requires_grad=True) for shape in ((5, 3), *((4, 3), (4, 3), (3, 4)) * 3)
    )
    out = grouped_swiglu(rows, [2, 0, 3], [tuple(matrices[i : i + 3]) for i in (0, 3, 6)])
    parts = {"all": [rows, *matrices], "rows": [rows], "matrices": matrices}
    aten = torch.ops.aten
    with ProductCounter(aten.mm.default, aten.mm.out, aten.addmm_.default) as counter:
        torch.autograd.grad(out.sum(), parts[wanted])
    assert counter.n_calls == n_products


def test_rows_are_sorted_by_expert_and_dropped_ones_are_none():
    chosen = torch.tensor([[2, 0], [3, 2], [0, 3]])  # 3 experts: 3 is dropped
    choices = sort_by_expert(chosen, 3)
    assert choices.counts.tolist() == [2, 0, 2]
    assert choices.order.token_of.tolist() == [0, 2, 0, 1]
    assert choices.order.place_of.tolist() == [[2, 0], [4, 3], [1, 4]]
    x = torch.arange(3.0)[:, None].requires_grad_()
    rows = spread(x, choices.order)
    rows.backward(torch.tensor([[1.0], [10.0], [100.0], [1000.0]]))
    assert rows.flatten().tolist() == [0, 2, 0, 1]
    assert x.grad.flatten().tolist() == [101, 1000, 10]
