"""The transformer against a plain rewriting of it, its cuts, its head and its low-rank updates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from crosscurrent.model.config import SIZES, LoRAConfig, MLPKind, ModelConfig
from crosscurrent.model.transformer import Head, Transformer

# Float64 rounds by 1.1e-16; a few layers of sums of at most 64 terms of about 1.
FLOAT64_ATOL = 1e-12


def make(seed: int = 0, **fields: object) -> tuple[ModelConfig, Transformer, Head]:
    shape = {"num_layers": 2, "embed_size": 12, "num_heads": 4, "num_groups": 2, "head_size": 6}
    config = ModelConfig(**{"vocab_size": 17, **shape, **fields})  # type: ignore[arg-type]
    torch.manual_seed(seed)
    model = Transformer(config).double()
    head = Head(config, model if config.tie_embeddings else None).double()
    # Larger than at the start of training, so that attention is far from uniform.
    for parameter in (*model.parameters(), *head.parameters()):
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return config, model, head


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_rotary(x: Tensor, position: int, theta: float) -> Tensor:
    """One head's vector, as complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.tensor([position * theta ** (-f / half) for f in range(half)], dtype=torch.float64)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def plain_forward(config: ModelConfig, model: Transformer, head: Head, ids: Tensor) -> Tensor:
    """Logits of one sequence, token by token and head by head, from the parameters alone."""
    P = {**dict(model.named_parameters()), "norm": head.norm.weight, "out": head.weight}
    H, G, D = config.num_heads, config.groups, config.head_dim
    x = P["embedding.weight"][ids]
    for i in range(config.num_layers):
        normed = plain_norm(x, P[f"layers.{i}.attention_norm.weight"], config.norm_eps)
        q, k, v = (
            (normed @ P[f"layers.{i}.attention.{n}.weight"].T).view(len(ids), -1, D) for n in ("q", "k", "v")
        )
        q, k = (
            torch.stack([plain_rotary(row, t, config.rope_theta) for t, row in enumerate(rows)])
            for rows in (q, k)
        )
        outs = []
        for t in range(len(ids)):
            heads = []
            for h in range(H):
                g = h // (H // G)
                weights = torch.softmax(k[: t + 1, g] @ q[t, h] / math.sqrt(D), 0)
                heads.append(weights @ v[: t + 1, g])
            outs.append(torch.cat(heads))
        x = x + torch.stack(outs) @ P[f"layers.{i}.attention.o.weight"].T
        normed = plain_norm(x, P[f"layers.{i}.mlp_norm.weight"], config.norm_eps)
        up = normed @ P[f"layers.{i}.mlp.up.weight"].T
        if config.mlp_kind is MLPKind.SWIGLU:
            gate = normed @ P[f"layers.{i}.mlp.gate.weight"].T
            hidden = gate * torch.sigmoid(gate) * up
        else:
            hidden = up * (1 + torch.erf(up / math.sqrt(2))) / 2
        x = x + hidden @ P[f"layers.{i}.mlp.down.weight"].T
    return plain_norm(x, P["norm"], config.norm_eps) @ P["out"].T


@pytest.mark.parametrize("mlp_kind", list(MLPKind))
@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_are_those_of_a_plain_rewriting(mlp_kind: MLPKind, tied: bool) -> None:
    config, model, head = make(mlp_kind=mlp_kind, tie_embeddings=tied)
    ids = torch.randint(config.vocab_size, (2, 7))
    parameters = list({id(p): p for p in (*model.parameters(), *head.parameters())}.values())
    logits = head(model(ids))
    expected = torch.stack([plain_forward(config, model, head, row) for row in ids])
    torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT64_ATOL)
    grads = torch.autograd.grad(logits.square().sum(), parameters)
    expected_grads = torch.autograd.grad(expected.square().sum(), parameters)
    for got, want in zip(grads, expected_grads, strict=True):
        # Gradients sum over 14 tokens and 17 logits, some of them in the hundreds.
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_columns_with_a_full_cache_are_the_whole() -> None:
    """project and finish, column by column at absolute positions, give what forward gives."""
    from crosscurrent.model.attention import attention

    config, model, _ = make()
    ids = torch.randint(config.vocab_size, (2, 9))
    whole = model(ids)
    x = model.embed(ids)
    for block in model.layers:
        keys, values, columns = [], [], []
        for start, stop in ((0, 4), (4, 5), (5, 9)):
            angles = model.angles(model.position(start), stop - start)
            q, k, v = block.project(x[:, start:stop], angles)
            assert all(
                torch.equal(a, b)
                for a, b in zip(block.project_kv(x[:, start:stop], angles), (k, v), strict=True)
            )
            keys.append(k)
            values.append(v)
            attended = attention(q, torch.cat(keys, 2), torch.cat(values, 2))
            columns.append(block.finish(x[:, start:stop], attended))
        x = torch.cat(columns, 1)
    torch.testing.assert_close(x, whole, rtol=0, atol=FLOAT64_ATOL)


def test_project_returns_the_contracts_shapes() -> None:
    config, model, _ = make()
    x = torch.randn(2, 5, config.embed_size).double()
    q, k, v = model.layers[0].project(x, model.angles(model.position(3), 5))
    assert q.shape == (2, 4, 5, 6)
    assert k.shape == v.shape == (2, 2, 5, 6)
    assert q.transpose(1, 2).is_contiguous()


def test_scores_depend_on_distances_only() -> None:
    """A shift of all positions, even by millions of tokens, leaves attention where it was."""
    config, model, _ = make()
    x = torch.randn(1, 6, config.embed_size).double()
    block = model.layers[0]
    near, far = (block(x, model.angles(model.position(start), 6)) for start in (0, 5_000_000))
    # Angles of 5e6 are known to 5e6 * 2^-53 = 6e-10, once for each of two positions, times values of 10.
    torch.testing.assert_close(near, far, rtol=0, atol=2e-8)
    assert not torch.equal(*(block.project(x, model.angles(model.position(start), 6))[0] for start in (0, 1)))


def test_float32_positions_far_out_are_as_good_as_near() -> None:
    config, model, _ = make()
    model = model.float()
    x = torch.randn(1, 6, config.embed_size)
    block = model.layers[0]
    # Rounding of float32, 6e-8, in values of about 10 after sums of up to 64 terms. Angles in
    # float32 would be wrong by 5e6 * 6e-8 = 0.3.
    near, far = (block(x, model.angles(model.position(start), 6)) for start in (0, 5_000_000))
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)


def test_parameter_names_are_natural() -> None:
    _, model, head = make(lora=LoRAConfig(rank=2))
    names = {name for name, _ in model.named_parameters()}
    for name in "qkvo":
        assert {f"layers.1.attention.{name}.{p}" for p in ("weight", "lora_a", "lora_b")} <= names
    assert {name for name, _ in head.named_parameters()} == {"norm.weight", "weight"}


class TestHead:
    def test_a_tied_head_has_the_embeddings_parameter(self) -> None:
        _, model, head = make(tie_embeddings=True)
        assert head.weight is model.embedding.weight

    def test_an_untied_head_has_its_own(self) -> None:
        _, model, head = make(tie_embeddings=False)
        assert head.weight is not model.embedding.weight

    @pytest.mark.parametrize("tied", [False, True])
    def test_a_tie_must_be_meant(self, tied: bool) -> None:
        config, model, _ = make(tie_embeddings=tied)
        with pytest.raises(ValueError, match="tie_embeddings"):
            Head(config, None if tied else model)

    def test_the_loss_is_the_sum_of_cross_entropies(self) -> None:
        config, model, head = make()
        ids = torch.randint(config.vocab_size, (2, 6))
        targets = torch.randint(config.vocab_size, (2, 6))
        targets[0, :3] = -100
        x = model(ids)
        log_p = torch.log_softmax(head(x), -1)
        expected = -sum(
            log_p[b, t, targets[b, t]] for b in range(2) for t in range(6) if targets[b, t] != -100
        )
        torch.testing.assert_close(head.loss_sum(x, targets), expected, rtol=0, atol=FLOAT64_ATOL)


class TestLoRA:
    def test_all_else_is_frozen(self) -> None:
        _, model, head = make(lora=LoRAConfig(rank=2))
        trainable = {n for n, p in (*model.named_parameters(), *head.named_parameters()) if p.requires_grad}
        assert trainable
        assert all("lora_" in name for name in trainable)
        assert len(trainable) == 2 * 4 * 2

    def test_without_it_all_is_trainable(self) -> None:
        _, model, head = make()
        assert all(p.requires_grad for p in (*model.parameters(), *head.parameters()))

    def test_training_starts_from_the_map_as_it_was(self) -> None:
        config = ModelConfig.named("tiny", lora=LoRAConfig(rank=2))
        torch.manual_seed(0)
        model = Transformer(config)
        x = torch.randn(3, config.embed_size)
        q = model.layers[0].attention.q
        assert torch.equal(q(x), functional.linear(x, q.weight))

    def test_the_update_is_scaled_by_alpha_over_rank(self) -> None:
        _, model, _ = make(lora=LoRAConfig(rank=2, alpha=6.0))
        q = model.layers[0].attention.q
        x = torch.randn(2, 3, 12).double()
        merged = q.weight + 3.0 * q.lora_b @ q.lora_a
        torch.testing.assert_close(q(x), x @ merged.T, rtol=0, atol=FLOAT64_ATOL)

    def test_gradients_are_those_of_the_merged_map(self) -> None:
        _, model, _ = make(lora=LoRAConfig(rank=2, alpha=6.0))
        q = model.layers[0].attention.q
        x = torch.randn(2, 3, 12).double().requires_grad_()
        leaves = [x, q.lora_a, q.lora_b]
        got = torch.autograd.grad(q(x).square().sum(), leaves)
        merged = q.weight + 3.0 * q.lora_b @ q.lora_a
        want = torch.autograd.grad((x @ merged.T).square().sum(), leaves)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)

    def test_dropout_only_acts_on_the_update_and_in_training(self) -> None:
        _, model, _ = make(lora=LoRAConfig(rank=2, dropout=0.5))
        q = model.layers[0].attention.q
        x = torch.randn(64, 12).double()
        model.eval()
        without = q(x)
        assert torch.equal(without, q(x))
        model.train()
        torch.manual_seed(0)
        assert not torch.equal(without, q(x))
        torch.nn.init.zeros_(q.lora_b)
        assert torch.equal(q(x), functional.linear(x, q.weight))


def test_evaluation_in_inference_mode_does_not_spoil_training() -> None:
    """The angles that evaluation left behind are used by the next training step."""
    config, model, head = make()
    ids = torch.randint(config.vocab_size, (1, 5))
    with torch.inference_mode():
        model(ids)
    head.loss_sum(model(ids), ids).backward()
    assert model.embedding.weight.grad is not None


class TestConfig:
    @pytest.mark.parametrize("name", list(SIZES))
    def test_named_sizes_are_valid(self, name: str) -> None:
        config = ModelConfig.named(name)
        assert config.head_dim * config.num_heads == config.embed_size

    def test_a_named_size_can_be_overridden(self) -> None:
        assert ModelConfig.named("tiny", num_layers=3).num_layers == 3

    def test_an_unknown_size_lists_the_known(self) -> None:
        with pytest.raises(ValueError, match=r"unknown model size 'huge'.*tiny.*xlarge"):
            ModelConfig.named("huge")

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
            ({"num_layers": 0}, "num_layers"),
            ({"num_groups": 3}, "num_heads 4 is no multiple of num_groups 3"),
            ({"num_groups": 0}, "groups must be at least 1"),
            ({"num_heads": 5, "num_groups": 5}, "embed_size 64 is no multiple of num_heads 5"),
            ({"head_size": 3}, "head_size must be even"),
            ({"mlp_size": 0}, "hidden_size must be at least 1"),
        ],
    )
    def test_what_cannot_be_a_model(self, fields: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ModelConfig.named("tiny", **fields)

    @pytest.mark.parametrize(
        ("fields", "message"), [({"rank": 0}, r"lora\.rank"), ({"dropout": 1.0}, r"lora\.dropout")]
    )
    def test_what_cannot_be_a_low_rank_update(self, fields: dict[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            LoRAConfig(**fields)  # type: ignore[arg-type]
