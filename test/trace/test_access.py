"""What ops read and write, from their schemas and from what schemas do not say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from crosscurrent.trace.access import Kind, Use, in_training, signature, unscaled

aten = torch.ops.aten
R, W, U, M = int(Use.READ), int(Use.WRITE), int(Use.UPDATE), int(Use.MANY)


def uses(func: Any) -> dict[str, int]:
    return {name: use for name, use in signature(func).by_name.items() if use}


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (aten.add.Tensor, {"self": R, "other": R}),
        (aten.add_.Tensor, {"self": U, "other": R}),
        (aten.add.out, {"self": R, "other": R, "out": W}),
        (aten.zero_.default, {"self": W}),
        (aten.fill_.Scalar, {"self": W}),
        (aten.normal_.default, {"self": W}),
        (aten.bernoulli_.float, {"self": U}),
        (aten.cat.default, {"tensors": R | M}),
        (aten.index_put_.default, {"self": U, "indices": R | M, "values": R}),
        (aten.scatter_.src, {"self": U, "index": R, "src": R}),
        (aten._foreach_add_.List, {"self": U | M, "other": R | M}),
        (aten._foreach_zero_.default, {"self": W | M}),
        (aten._foreach_copy_.default, {"self": W | M, "src": R | M}),
        (aten.native_layer_norm.default, {"input": R, "weight": R, "bias": R}),
        (
            aten.batch_norm_gather_stats_with_counts.default,
            {"input": R, "mean": R, "invstd": R, "running_mean": U, "running_var": U, "counts": R},
        ),
        (aten.ones_like.default, {}),
        (aten.new_full.default, {}),
        (aten.resize_as_.default, {"self": U}),
        (
            aten._amp_foreach_non_finite_check_and_unscale_.default,
            {"self": U | M, "found_inf": U, "inv_scale": R},
        ),
    ],
    ids=str,
)
def test_uses(func: Any, expected: dict[str, int]) -> None:
    assert uses(func) == expected


def test_fused_optimizers_update_their_lists() -> None:
    found = uses(aten._fused_adam_.default)
    assert [found[name] for name in ("self", "exp_avgs", "exp_avg_sqs")] == [U | M] * 3
    assert found["state_steps"] == R | M


def test_fused_optimizers_write_gradients_only_to_unscale_them() -> None:
    for func in (aten._fused_adamw_.tensor_lr, aten._fused_sgd_.default, aten._fused_adagrad_.default):
        sign = signature(func)
        assert sign.kind is Kind.FUSED
        assert sign.by_name["grads"] == sign.positional[1] == U | M
        without = unscaled(sign)
        assert without.by_name == {**sign.by_name, "grads": R | M}
        assert without.positional == tuple(without.by_name.values())


@pytest.mark.parametrize(
    ("func", "kind"),
    [
        (aten.view.default, Kind.NOTHING),
        (aten.split.Tensor, Kind.NOTHING),
        (aten.expand.default, Kind.NOTHING),
        (aten.detach.default, Kind.NOTHING),
        (aten._unsafe_view.default, Kind.NOTHING),
        (aten.t_.default, Kind.NOTHING),
        (aten.as_strided_.default, Kind.NOTHING),
        (aten.set_.source_Tensor, Kind.NOTHING),
        (aten.sym_size.int, Kind.NOTHING),
        (aten.empty.memory_format, Kind.EMPTY),
        (aten.new_empty.default, Kind.EMPTY),
        (aten.empty_strided.default, Kind.EMPTY),
        (aten.view_copy.default, Kind.PLAIN),
        (aten.clone.default, Kind.PLAIN),
        (aten.reshape.default, Kind.PLAIN),
        (aten.copy_.default, Kind.COPY),
        (aten._to_copy.default, Kind.TO_COPY),
        (aten.copy.default, Kind.TO_COPY),
        (aten.copy.out, Kind.PLAIN),
        (aten.empty.out, Kind.EMPTY),
        (aten.where.default, Kind.WAITS),
        (aten.where.self, Kind.PLAIN),
        (aten.nonzero.out, Kind.WAITS),
        (aten._fused_sdp_choice.default, Kind.NOTHING),
        (aten._local_scalar_dense.default, Kind.WAITS),
        (aten.nonzero.default, Kind.WAITS),
        (aten.nonzero_static.default, Kind.PLAIN),
        (aten.index.Tensor, Kind.INDEX),
        (aten.resize_.default, Kind.RESIZE),
        (aten._pin_memory.default, Kind.PIN),
    ],
    ids=str,
)
def test_kinds(func: Any, kind: Kind) -> None:
    assert signature(func).kind is kind


def test_batch_norm_updates_its_statistics_in_training_only() -> None:
    sign = signature(aten.native_batch_norm.default)
    assert sign.kind is Kind.BATCH_NORM
    assert sign.by_name["running_mean"] == R
    training = in_training(sign)
    assert [training.by_name[name] for name in ("input", "running_mean", "running_var")] == [R, U, U]
    assert training.positional[3:5] == (U, U)


def _all_overloads() -> list[Any]:
    found = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten" or "t(" in str(schema) or "Dict" in str(schema):  # TorchScript's containers
            continue
        packet = getattr(aten, name, None)
        func = getattr(packet, schema.overload_name or "default", None)
        if isinstance(func, torch._ops.OpOverload):
            found.append(func)
    return found


def test_every_overload_is_digested_and_loses_no_write() -> None:
    """A declared write is a write in the signature, unless only shape and strides change.

    Running statistics are the only ones that are written without a declaration.
    """
    statistics = ("running_mean", "running_var")
    overloads = _all_overloads()
    assert len(overloads) > 2000
    for func in overloads:
        sign = signature(func)
        if sign.kind in (Kind.NOTHING, Kind.RECORD_STREAM):
            continue
        for argument in func._schema.arguments:
            declared = argument.alias_info is not None and argument.alias_info.is_write
            written = bool(sign.by_name[argument.name] & W)
            if written and not declared:
                assert argument.name in statistics, func
            else:
                assert written == (declared and "Tensor" in str(argument.type)), func


def test_running_statistics_are_written_wherever_an_op_takes_them() -> None:
    """Ops made of others are taken apart, and some say in their names that they leave them alone."""
    spared = ("no_update", "no_training", "functional", "backward")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    taking = [
        func
        for func in _all_overloads()
        if "running_mean" in [argument.name for argument in func._schema.arguments]
        and not any(word in str(func) for word in spared)
        and not has_kernel(func._name, "CompositeImplicitAutograd")
    ]
    assert torch.ops.aten.native_batch_norm.default in taking
    for func in taking:
        sign = signature(func)
        assert sign.kind is Kind.BATCH_NORM or sign.by_name["running_mean"] & W, func


def test_overloads_that_touch_nothing_change_no_content() -> None:
    """What is taken to touch nothing either returns views only, no tensor, or is known to be harmless."""
    harmless = {
        "_unsafe_view",
        "lift",
        "_efficientzerotensor",
        "broadcast_tensors",
        "set_data",
        "retain_grad",
    }
    touching_nothing = [
        func
        for func in _all_overloads()
        if signature(func).kind is Kind.NOTHING and func._schema.name.removeprefix("aten::") not in harmless
    ]
    assert torch.ops.aten.view.default in touching_nothing
    for func in touching_nothing:
        schema = func._schema
        makes = [r for r in schema.returns if "Tensor" in str(r.type) and r.alias_info is None]
        assert not makes or "_nested_tensor_" in schema.name, func
        writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        flags = "requires_grad" in schema.name or "retain_grad" in schema.name
        assert not writes or flags or torch.Tag.inplace_view in func.tags, func


def test_results_in_an_arguments_memory_are_views(run: Any, ops: Any) -> None:
    def program() -> None:
        x = torch.ones(4, device="cuda")
        torch.ops.aten._unsafe_view(x, [2, 2])
        with torch.inference_mode():
            x.reshape(2, 2).contiguous().to(torch.float32)

    assert ops(run(program)) == [("ones", "cuda:0 default", "w")]


def test_reads_come_before_writes_and_results_last(run: Any, ops: Any) -> None:
    def program() -> None:
        x = torch.ones(4, device="cuda")
        y = x + x
        y.add_(x)
        torch.mul(x, y, out=x)
        torch._foreach_mul_([x, y], 2.0)
        torch.var_mean(x)

    assert [(name, uses) for name, _, uses in ops(run(program))] == [
        ("ones", "w"),
        ("add", "rrw"),
        ("add_", "rwr"),
        ("mul", "rrw"),
        ("_foreach_mul_", "rwrw"),
        ("var_mean", "rww"),
    ]


def test_custom_op_is_read_from_its_schema(run: Any, ops: Any) -> None:
    with torch.library._scoped_library("crosscurrent_test", "DEF") as library:
        library.define("accumulate(Tensor(a!) total, Tensor x) -> ()")
        library.impl("accumulate", lambda total, x: None, "CompositeExplicitAutograd")

        def program() -> None:
            x = torch.ones(4, device="cuda")
            torch.ops.crosscurrent_test.accumulate(x, x[:2])

        assert ops(run(program))[1:] == [("accumulate", "cuda:0 default", "rwr")]


def test_custom_op_with_pinned_memory_is_listed(run: Any, ops: Any) -> None:
    """Its kernel may read host memory directly: then the host may not touch it before the stream is done."""
    with torch.library._scoped_library("crosscurrent_uva", "DEF") as library:
        library.define("gather(Tensor table, Tensor(a!) out) -> ()")
        library.impl("gather", lambda table, out: None, "CompositeExplicitAutograd")

        def program(tracer: Any) -> None:
            device, host = torch.ones(4, device="cuda"), torch.ones(4, pin_memory=True)
            tracer.op(torch.ops.crosscurrent_uva.gather.default, (host, device), {}, None)
            host.fill_(2)

        watches: list[Any] = []
        watch = run(lambda: program(watches[0].tracer), entered=watches.append)
    assert ("gather", "cuda:0 default", "rwr") in ops(watch)
    assert [what.op for what in watch.unknown] == ["crosscurrent_uva.gather.default"]
    assert [finding.kind.value for finding in watch.findings] == ["write-after-read"]


@pytest.mark.parametrize("source", ["run", "run_by_callbacks"])
@pytest.mark.parametrize("waits", [False, True])
def test_custom_op_takes_memory_of_both_kinds(
    source: str, waits: bool, ops: Any, request: pytest.FixtureRequest
) -> None:
    """PyTorch asks nobody who registers an op to keep to one device: here blocks are swapped out."""

    def swap(blocks: list[torch.Tensor], kept: list[torch.Tensor], table: torch.Tensor) -> None:
        for block, row in zip(blocks, table.tolist(), strict=True):
            kept[row].copy_(block)

    with torch.library._scoped_library("crosscurrent_swap", "DEF") as library:
        library.define("out(Tensor[] blocks, Tensor(a!)[] kept, Tensor table) -> ()")
        library.impl("out", swap, "CompositeExplicitAutograd")

        def program() -> None:
            blocks = [torch.full((2,), 1.0, device="cuda"), torch.full((2,), 2.0, device="cuda")]
            kept = [torch.zeros(2, pin_memory=True), torch.zeros(2, device="cuda")]
            torch.ops.crosscurrent_swap.out(blocks, kept, torch.tensor([1, 0]))  # and pageable memory
            if waits:
                torch.cuda.synchronize()
            assert kept[0].sum().item() == 4

        watch = request.getfixturevalue(source)(program)
    assert ("out", "cuda:0 default", "rrrwrw") in ops(watch)
    assert [each.op for each in watch.unknown] == ["crosscurrent_swap.out.default"]
    assert bool(watch.findings) is not waits


@pytest.mark.two_gpus
def test_list_over_two_devices_is_an_op_on_each(run: Any, ops: Any) -> None:
    def program(tracer: Any) -> None:
        tensors = [torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1")]
        tracer.op(torch.ops.aten._foreach_add_.Scalar, (tensors, 1.0), {}, None)

    watches: list[Any] = []
    watch = run(lambda: program(watches[0].tracer), devices=2, entered=watches.append)
    assert ops(watch)[2:] == [
        ("_foreach_add_", "cuda:0 default", "rw"),
        ("_foreach_add_", "cuda:1 default", "rw"),
    ]


def test_higher_order_op_is_listed_when_its_effects_are_not_known(run: Any, ops: Any) -> None:
    def program(x: torch.Tensor) -> None:
        torch.ops.higher_order.cond(True, lambda v: v + 1, lambda v: v - 1, (x,))

    watch = run(lambda: program(torch.ones(4, device="cuda")))
    assert [what.op for what in watch.unknown] == ["cond"]
