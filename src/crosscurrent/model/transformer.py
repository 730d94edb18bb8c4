"""A compact decoder: RMSNorm, rotary grouped-query attention, SwiGLU or plain MLP, a head.

Usage, whole (the reference), or in the pieces that a bounded cache needs:

    model = Transformer(config)
    head = Head(config)                                  # Head(config, model) if tie_embeddings
    hidden_BTE = model(ids_BT)                           # ordinary full causal attention
    loss = head.loss_sum(hidden_BTE, targets_BT)         # a sum; -100 is ignored

    x_BTE, angles = model.embed(ids_BT), model.angles(model.position(start), ids_BT.shape[1])
    for block in model.layers:
        q_BHTD, k_BGTD, v_BGTD = block.project(x_BTE, angles)  # once for a whole column
        attended_BHTD = ...                                   # chunk by chunk
        x_BTE = block.finish(x_BTE, attended_BHTD)            # once for a whole column

Legend: B batch, T tokens, E hidden size, H query heads, G query groups, D head size. Attention outputs in
[B, T, H, D] buffers, passed transposed, reach the output projection without a copy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from crosscurrent.model.attention import attention
from crosscurrent.model.config import MLPKind, ModelConfig
from crosscurrent.model.lora import Linear
from crosscurrent.model.loss import cross_entropy_sum
from crosscurrent.model.rope import Angles, Rope, rotate

_INIT_STD = 0.02


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in one fused call."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """The four projections of grouped-query attention; who attends to what is decided outside."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, kv_width = config.num_heads * config.head_dim, config.groups * config.head_dim
        self.q = Linear(config.embed_size, width, lora=config.lora)
        self.k = Linear(config.embed_size, kv_width, lora=config.lora)
        self.v = Linear(config.embed_size, kv_width, lora=config.lora)
        self.o = Linear(width, config.embed_size, lora=config.lora)


class MLP(nn.Module):
    """SwiGLU or plain, as the config says."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        gated = config.mlp_kind is MLPKind.SWIGLU
        self.gate = Linear(config.embed_size, config.hidden_size) if gated else None
        self.up = Linear(config.embed_size, config.hidden_size)
        self.down = Linear(config.hidden_size, config.embed_size)

    def forward(self, x_BTE: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(functional.gelu(self.up(x_BTE)))  # type: ignore[no-any-return]
        return self.down(functional.silu(self.gate(x_BTE)) * self.up(x_BTE))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer, cut where the cache comes in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.embed_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.embed_size, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.head_size = config.head_dim

    def project(self, x_BTE: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, D], keys and values [B, G, T, D] of the positions that the angles belong to."""
        normed_BTE = self.attention_norm(x_BTE)
        q_BHTD = rotate(self._heads(self.attention.q(normed_BTE)), angles)
        return q_BHTD, *self._keys_values(normed_BTE, angles)

    def project_kv(self, x_BTE: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Keys and values only, to the same bits as `project`."""
        return self._keys_values(self.attention_norm(x_BTE), angles)

    def finish(self, x_BTE: Tensor, attended_BHTD: Tensor) -> Tensor:
        """The layer's output from its input and the attention's output."""
        y_BTE = x_BTE + self.attention.o(attended_BHTD.transpose(1, 2).flatten(2))
        return y_BTE + self.mlp(self.mlp_norm(y_BTE))  # type: ignore[no-any-return]

    def forward(self, x_BTE: Tensor, angles: Angles) -> Tensor:
        """The layer with full causal attention among the T tokens."""
        return self.finish(x_BTE, attention(*self.project(x_BTE, angles)))

    def _keys_values(self, normed_BTE: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        v_BGTD = self._heads(self.attention.v(normed_BTE))
        return rotate(self._heads(self.attention.k(normed_BTE)), angles), v_BGTD

    def _heads(self, x_BTW: Tensor) -> Tensor:
        return x_BTW.view(*x_BTW.shape[:2], -1, self.head_size).transpose(1, 2)


class Transformer(nn.Module):
    """Everything below the head. With `config.lora` all but the low-rank parameters are frozen."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embed_size)
        self.rope = Rope(head_size=config.head_dim, theta=config.rope_theta)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self._init_parameters()

    def _init_parameters(self) -> None:
        # What writes into the residual stream starts smaller by the root of the number of writers
        # (Radford et al. 2019), so that the variance does not grow with the depth.
        residual_std = _INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if "lora_" in name:
                continue
            if self.config.lora is not None:
                parameter.requires_grad_(False)
            if parameter.dim() > 1:
                is_residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else _INIT_STD)

    def embed(self, ids_BT: Tensor) -> Tensor:
        """The first layer's input [B, T, E]."""
        return self.embedding(ids_BT)  # type: ignore[no-any-return]

    def position(self, start: int) -> Tensor:
        """A position, for `angles`: a tensor of one integer on the model's device."""
        return torch.full((), start, dtype=torch.int32, device=self.embedding.weight.device)

    def angles(self, start: Tensor, length: int) -> Angles:
        """The rotations of the positions start .. start + length, for all layers."""
        return self.rope.angles(start, length, dtype=self.embedding.weight.dtype)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Hidden states [B, T, E] with ordinary full causal attention: what caches approximate."""
        x_BTE, angles = self.embed(ids_BT), self.angles(self.position(0), ids_BT.shape[1])
        for block in self.layers:
            x_BTE = block(x_BTE, angles)
        return x_BTE


class Head(nn.Module):
    """Final norm and output matrix; with `tie_embeddings` that is the transformer's own parameter."""

    def __init__(self, config: ModelConfig, transformer: Transformer | None = None) -> None:
        super().__init__()
        if config.tie_embeddings != (transformer is not None):
            given = "no transformer" if transformer is None else "a transformer"
            raise ValueError(
                f"got tie_embeddings={config.tie_embeddings} and {given}; a tied head is made as "
                f"Head(config, transformer), an untied one as Head(config)"
            )
        self.norm = RMSNorm(config.embed_size, eps=config.norm_eps)
        if transformer is not None:
            self.weight = transformer.embedding.weight
        else:
            self.weight = nn.Parameter(torch.randn(config.vocab_size, config.embed_size) * _INIT_STD)
        if config.lora is not None:
            self.requires_grad_(False)

    def forward(self, x_BTE: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        return functional.linear(self.norm(x_BTE), self.weight)

    def loss_sum(self, x_BTE: Tensor, targets_BT: Tensor) -> Tensor:
        """Sum of the cross entropies; -100 is ignored. Call it for one of `loss.slices` at a time."""
        return cross_entropy_sum(self(x_BTE), targets_BT)
