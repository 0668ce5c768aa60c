"""The weights that `initialize` draws have the distribution of the recipe each layer asks for."""

import math

import pytest
import torch
from torch import nn

from shared.initialization import Activation, initialize


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_std(weight, expected):
    """The sample deviation lies within 5 standard errors of `expected`, and the mean of 0.

    1 / sqrt(2 n) is the relative standard error for a normal distribution; for a uniform one it is
    smaller.
    """
    n = weight.numel()
    assert n >= 4000, "too few weights for a sharp test"
    assert weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * n))
    assert abs(weight.mean().item()) < 5 * expected / math.sqrt(n)


LINEAR = nn.Linear, (200, 50)  # fan-in 200, fan-out 50
CONV = nn.Conv2d, (32, 16, 3)  # fan-in 288, fan-out 144


@pytest.mark.parametrize(
    ("activation", "layer", "expected"),
    [
        ("relu", LINEAR, math.sqrt(2 / 200)),
        ("relu", CONV, math.sqrt(2 / 144)),
        ("tanh", LINEAR, 5 / 3 * math.sqrt(2 / 250)),
        ("tanh", CONV, 5 / 3 * math.sqrt(2 / 432)),
        ("sigmoid", LINEAR, math.sqrt(2 / 250)),
        ("sigmoid", CONV, math.sqrt(2 / 432)),
        ("none", LINEAR, 0.01),
        ("none", CONV, 0.01),
    ],
)
def test_the_spread_of_a_layer_is_that_of_its_activation(activation: Activation, layer, expected):
    cls, args = layer
    module = cls(*args)
    initialize(module, activation)
    assert_std(module.weight, expected)
    assert torch.equal(module.bias, torch.zeros_like(module.bias))


@pytest.mark.parametrize("cls", [nn.Conv1d, nn.Conv3d])
def test_convolutions_of_other_dimensions_follow_the_same_rule(cls):
    conv = cls(40, 20, 3, bias=False)
    initialize(conv, "relu")
    receptive_field = conv.weight[0, 0].numel()
    assert conv.weight.std().item() == pytest.approx(
        math.sqrt(2 / (20 * receptive_field)), rel=5 / math.sqrt(2 * conv.weight.numel())
    )


def test_a_residual_network_gets_the_usual_recipe():
    """Kaiming normal over the fan-out for convolutions, drawn in the order of the modules."""

    def block():
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)
        )

    ours, usual = block(), block()
    torch.manual_seed(1)
    initialize(ours, "relu")
    torch.manual_seed(1)
    for module in usual.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    assert torch.equal(ours[0].weight, usual[0].weight)
    assert torch.equal(ours[3].weight, usual[3].weight)


def test_relu_keeps_the_size_of_activations_through_many_linear_layers():
    layers = [m for _ in range(30) for m in (nn.Linear(128, 128), nn.ReLU())]
    model = nn.Sequential(*layers)
    initialize(model, "relu")
    x = torch.randn(64, 128)
    ratio = model(x).pow(2).mean() / x.pow(2).mean()
    assert 0.05 < ratio.item() < 20.0  # PyTorch's own initial weights: 0.002


def test_the_first_logits_of_a_narrow_classifier_are_not_huge():
    head = nn.Linear(512, 10)
    features = torch.rand(64, 512)
    initialize(head, "relu")
    assert head(features).std().item() < 2.0  # over the fan-out: 6.2
    initialize(head, "none")
    assert head(features).std().item() < 0.3


def test_a_layer_can_be_initialized_again_without_touching_the_others():
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100))
    initialize(model, "relu")
    first = model[0].weight.clone()
    initialize(model[2], "none")
    assert torch.equal(model[0].weight, first)
    assert_std(model[2].weight, 0.01)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm1d(4, affine=True),
        nn.InstanceNorm2d(4, affine=True),
        nn.InstanceNorm3d(4, affine=True),
        nn.GroupNorm(2, 4),
        nn.LayerNorm((4, 3)),
        nn.RMSNorm(4),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_norms_begin_as_the_identity(norm):
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    initialize(norm, "relu")
    for name, parameter in norm.named_parameters():
        assert torch.equal(parameter, torch.full_like(parameter, float(name == "weight")))


@pytest.mark.parametrize(
    "module", [nn.BatchNorm2d(4, affine=False), nn.LayerNorm(4, elementwise_affine=False)]
)
def test_layers_without_parameters_are_left_alone(module):
    initialize(module, "relu")
    assert list(module.parameters()) == []


@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_are_small_and_their_padding_row_is_zero(cls):
    embedding = cls(300, 20, padding_idx=7)
    initialize(embedding, "relu")
    others = torch.cat([embedding.weight[:7], embedding.weight[8:]])
    assert_std(others, 0.02)
    assert torch.equal(embedding.weight[7], torch.zeros(20))


@pytest.mark.parametrize("embedding_first", [True, False])
def test_a_weight_shared_with_the_output_layer_is_that_of_an_embedding(embedding_first):
    embedding, output = nn.Embedding(300, 20, padding_idx=0), nn.Linear(20, 300)
    output.weight = embedding.weight
    modules = [embedding, output] if embedding_first else [output, embedding]
    initialize(nn.ModuleList(modules), "relu")
    assert_std(output.weight[1:], 0.02)
    assert torch.equal(output.weight[0], torch.zeros(20))


class TestLstm:
    hidden = 40

    @pytest.fixture(params=[{}, {"proj_size": 12}], ids=["plain", "projected"])
    def lstm(self, request):
        lstm = nn.LSTM(60, self.hidden, num_layers=2, bidirectional=True, **request.param)
        for parameter in lstm.parameters():
            nn.init.constant_(parameter, 9.0)
        initialize(lstm, "relu")
        return lstm

    def test_the_input_weights_of_each_gate_are_glorots(self, lstm):
        bound = math.sqrt(6 / (60 + self.hidden))
        for name in ("weight_ih_l0", "weight_ih_l0_reverse"):
            weight = getattr(lstm, name)
            assert_std(weight, math.sqrt(2 / (60 + self.hidden)))
            assert weight.abs().max().item() <= bound

    def test_the_recurrent_weights_of_each_gate_are_orthogonal(self, lstm):
        recurrent = [p for name, p in lstm.named_parameters() if name.startswith("weight_hh")]
        assert len(recurrent) == 4
        gates = [gate for weight in recurrent for gate in weight.chunk(4)]
        width = gates[0].shape[1]
        for gate in gates:
            torch.testing.assert_close(gate.T @ gate, torch.eye(width), atol=1e-5, rtol=0)

    def test_only_the_forget_gate_is_biased_and_its_two_biases_sum_to_one(self, lstm):
        for layer in ("l0", "l0_reverse", "l1", "l1_reverse"):
            total = getattr(lstm, f"bias_ih_{layer}") + getattr(lstm, f"bias_hh_{layer}")
            forget = slice(self.hidden, 2 * self.hidden)
            expected = torch.zeros(4 * self.hidden)
            expected[forget] = 1.0
            assert torch.equal(total, expected)

    def test_a_cell_remembers_from_the_start(self):
        """The gate that is biased is the one that PyTorch uses to keep the cell state."""
        lstm = nn.LSTM(1, 5)
        initialize(lstm, "none")
        nn.init.zeros_(lstm.weight_ih_l0)
        nn.init.zeros_(lstm.weight_hh_l0)
        cell = torch.full((1, 5), 2.0)
        _, (_, kept) = lstm(torch.zeros(1, 1), (torch.zeros(1, 5), cell))
        torch.testing.assert_close(kept, cell * torch.sigmoid(torch.tensor(1.0)))

    def test_every_parameter_of_the_lstm_is_drawn(self, lstm):
        for parameter in lstm.parameters():
            assert not (parameter == 9.0).any()

    def test_an_lstm_without_biases_is_accepted(self):
        lstm = nn.LSTM(4, 4, bias=False)
        initialize(lstm, "tanh")
        gate = lstm.weight_hh_l0[:4]
        torch.testing.assert_close(gate.T @ gate, torch.eye(4), atol=1e-5, rtol=0)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([3.0]))


def test_modules_that_are_not_known_stay_as_pytorch_made_them():
    model = nn.ModuleList([nn.GRU(3, 3), nn.ConvTranspose2d(3, 3, 2), Scale()])
    before = [parameter.clone() for parameter in model.parameters()]
    initialize(model, "relu")
    assert all(map(torch.equal, before, model.parameters()))


def test_the_weights_repeat_with_the_seed_of_the_global_generator():
    def weights():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 5), nn.LSTM(5, 5), nn.Embedding(5, 5))
        torch.manual_seed(4)
        initialize(model, "relu")
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    assert torch.equal(weights(), weights())


def test_initial_weights_still_take_gradients():
    model = nn.Sequential(nn.Embedding(4, 3, padding_idx=0), nn.Linear(3, 2))
    initialize(model, "relu")
    model(torch.tensor([1, 2])).sum().backward()
    for parameter in model.parameters():
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert parameter.grad is not None
