"""Initial weights, chosen by the activation that follows a layer."""

from typing import Literal, assert_never

import torch
from torch import Tensor, nn

Activation = Literal["relu", "tanh", "sigmoid", "none"]
"""What follows a layer's output. `none` is for layers that end a network, such as a classifier."""

NO_ACTIVATION_STD = 0.01
"""Krizhevsky et al., ImageNet Classification with Deep Convolutional Neural Networks, 2012."""

EMBEDDING_STD = 0.02
"""Radford et al., Improving Language Understanding by Generative Pre-Training, 2018."""

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
Embedding = nn.Embedding | nn.EmbeddingBag
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
Norm = BatchNorm | InstanceNorm | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm


def initialize(model: nn.Module, activation: Activation) -> None:
    """Draw new weights for `model` and all its children, in place, from torch's global generator.

    - Convolutions and linear layers, by activation. `relu`: He et al., Delving Deep into
      Rectifiers, 2015, normal; over the fan-out for convolutions, which is the usual recipe of
      ResNets, and over the fan-in for linear layers, because the fan-out of a classifier with few
      classes is so small that its first logits would be huge. `tanh` and `sigmoid`: Glorot &
      Bengio, Understanding the Difficulty of Training Deep Feedforward Neural Networks, 2010,
      uniform, with the gain of `torch.nn.init.calculate_gain`. `none`: normal with standard
      deviation `NO_ACTIVATION_STD`. Biases are 0.
    - LSTMs, whatever the activation, see `_initialize_lstm`.
    - Normalization layers: weight 1, bias 0.
    - Embeddings: normal with standard deviation `EMBEDDING_STD`; the row of `padding_idx` is 0.
      They come last, so that a weight shared with an output layer is an embedding's.

    Parameters of any other module (`nn.GRU`, `nn.MultiheadAttention`'s input projection,
    transposed convolutions, a module of one's own) stay as PyTorch made them.

    A network in which one layer differs is initialised twice, the second time from that layer on:
    `initialize(model, "relu")`, then `initialize(model.fc, "none")`.
    """
    for module in model.modules():
        if isinstance(module, Conv | nn.Linear):
            _initialize_weight(module, activation)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LSTM):
            _initialize_lstm(module)
        elif isinstance(module, Norm):
            _initialize_norm(module)
    for module in model.modules():
        if isinstance(module, Embedding):
            _initialize_embedding(module)


def _initialize_weight(layer: Conv | nn.Linear, activation: Activation) -> None:
    match activation:
        case "relu":
            mode: Literal["fan_in", "fan_out"]
            mode = "fan_in" if isinstance(layer, nn.Linear) else "fan_out"
            nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")
        case "tanh" | "sigmoid":
            nn.init.xavier_uniform_(layer.weight, gain=nn.init.calculate_gain(activation))
        case "none":
            nn.init.normal_(layer.weight, std=NO_ACTIVATION_STD)
        case _:
            assert_never(activation)


def _initialize_lstm(lstm: nn.LSTM) -> None:
    """Draw input weights by Glorot & Bengio, recurrent ones orthogonal, and open the forget gate.

    Orthogonal matrices keep the norm of what passes through them at every step (Saxe et al., Exact
    Solutions to the Nonlinear Dynamics of Learning in Deep Linear Neural Networks, 2014). A
    forget-gate bias of 1 lets gradients reach far back from the start (Gers et al., Learning to
    Forget, 2000; Jozefowicz et al., An Empirical Exploration of Recurrent Network Architectures,
    2015).
    """
    for name, parameter in lstm.named_parameters():
        if name.startswith("weight_ih"):
            for gate in _gates(parameter):
                nn.init.xavier_uniform_(gate)
        elif name.startswith("weight_hh"):
            for gate in _gates(parameter):
                nn.init.orthogonal_(gate)
        elif name.startswith("weight_hr"):  # the projection of proj_size > 0
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)
            # b_ih and b_hh are added, so one of them alone carries the 1.
            if name.startswith("bias_ih"):
                _, forget, _, _ = _gates(parameter)
                nn.init.ones_(forget)


def _gates(parameter: Tensor) -> tuple[Tensor, ...]:
    """Split what PyTorch stacks into views: the input, forget, cell and output gate.

    Each gate is a matrix of its own: taken as one, the fan-out would be four times too large and
    the blocks would not be orthogonal.
    """
    return parameter.detach().chunk(4)


def _initialize_norm(norm: Norm) -> None:
    for name, parameter in norm.named_parameters(recurse=False):
        nn.init.constant_(parameter, 1.0 if name == "weight" else 0.0)


def _initialize_embedding(embedding: Embedding) -> None:
    nn.init.normal_(embedding.weight, std=EMBEDDING_STD)
    if embedding.padding_idx is not None:
        with torch.no_grad():
            embedding.weight[embedding.padding_idx].zero_()
