"""Private names of torch that have to do with compiled graphs and dispatch modes."""

from __future__ import annotations

from weft.torch_private.entry import PrivateNames

DYNAMO = (
    PrivateNames(
        "torch._C._dynamo.eval_frame",
        ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction"),
        "functions that autograd calls and Dynamo shall not compile",
        ("autograd/frames.py",),
    ),
    PrivateNames(
        "torch._dynamo.comptime",
        ("comptime",),
        "calling a function once, while code is traced",
        ("compiler/tracing.py",),
    ),
    PrivateNames(
        "torch._dynamo.callback.callback_handler",
        ("register_start_callback", "start_callbacks"),
        "shards become storages of their own before a compiler looks at them",
        ("compiler/tracing.py",),
    ),
    PrivateNames(
        "torch._guards",
        ("CompileContext", "TracingContext"),
        "which piece of code is traced, and notes that last as long as its compilation",
        ("compiler/tracing.py",),
    ),
    PrivateNames(
        "types.FunctionType",
        ("_dynamo_marked_constant",),
        "methods that run while they are traced, as torch.compiler.assume_constant_result marks them",
        ("compiler/tracing.py",),
        is_convention=True,
    ),
    PrivateNames(
        "torch._dynamo.compiled_autograd",
        ("_enable", "compiled_autograd_enabled"),
        "tracing one backward, and whether backwards are traced",
        ("compiler/traced_backward.py", "compiler/tracing.py"),
    ),
    PrivateNames(
        "torch._dynamo.config",
        ("optimize_ddp",),
        "the form of buckets that torch's own switch asks for",
        ("compiler/settings.py",),
    ),
    PrivateNames(
        "torch._dynamo.utils",
        ("counters",),
        "counts of what the passes did, beside torch's own",
        ("compiler/pipeline.py",),
    ),
    PrivateNames(
        "torch._dynamo.backends.common",
        ("aot_autograd",),
        "a backend that runs graphs as they are, with weft's passes",
        ("compiler/backend.py",),
    ),
    PrivateNames(
        "torch._functorch._aot_autograd.utils",
        ("make_boxed_func",),
        "the same: how AOTAutograd calls a graph",
        ("compiler/backend.py",),
    ),
)

INDUCTOR = (
    PrivateNames(
        "torch._inductor",
        ("list_mode_options",),
        "modes of Inductor by name, for weft's backend",
        ("compiler/backend.py",),
    ),
    PrivateNames(
        "torch._inductor.compile_fx",
        ("compile_fx",),
        "Inductor behind weft's backend",
        ("compiler/backend.py",),
    ),
    PrivateNames(
        "torch._inductor.config",
        ("pre_grad_custom_pass", "post_grad_custom_post_pass"),
        "where weft's passes are hooked in",
        ("compiler/install.py",),
    ),
    PrivateNames(
        "torch._inductor.config",
        ("max_autotune", "max_autotune_gemm"),
        "whether Inductor would measure operations that weft writes in place",
        ("compiler/passes/make_in_place.py",),
    ),
    PrivateNames(
        "torch._inductor.config",
        ("_fuse_ddp_communication_passes",),
        "the form of buckets that torch's own switch asks for",
        ("compiler/settings.py",),
        is_optional=True,
    ),
    PrivateNames(
        "torch._inductor.custom_graph_pass",
        ("CustomGraphPass",),
        "a pass that Inductor's cache knows by its source",
        ("compiler/inductor_passes.py",),
    ),
)

GRAPHS = (
    PrivateNames(
        "torch.ops.aten",
        ("_to_copy",),
        "finding shards in graphs behind a change of dtype",
        ("compiler/passes/find_shards.py",),
    ),
    PrivateNames(
        "torch.ops.aten",
        ("_unsafe_index_put", "_unsafe_masked_index_put_accumulate"),
        "finding gradients of embeddings, which may be written in place",
        ("compiler/passes/make_in_place.py",),
    ),
    PrivateNames(
        "torch._ops.OpOverload",
        ("_schema",),
        "which arguments an operation writes to, and how many floating-point operations it takes",
        ("compiler/passes/drop_copies.py", "planning/imagined_values.py", "planning/measure.py"),
        on_instances=True,
    ),
    PrivateNames(
        "torch.utils._pytree",
        ("tree_leaves", "tree_map_only"),
        "arguments of graph nodes, nested as they are",
        ("compiler/graphs.py",),
    ),
    PrivateNames(
        "torch.utils._python_dispatch",
        ("is_traceable_wrapper_subclass",),
        "whether a parameter is a tensor around others, whose parts are sharded",
        ("fsdp/api.py",),
    ),
    PrivateNames(
        "torch.utils._python_dispatch",
        ("TorchDispatchMode", "_disable_current_modes"),
        "a plan's run on tensors without data: each operation seen, and computed outside of all modes",
        (
            "planning/imagined_values.py",
            "planning/measure.py",
            "planning/memory.py",
            "planning/imagined_group.py",
        ),
    ),
)
