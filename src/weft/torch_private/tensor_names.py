"""Private names of torch that have to do with tensors, autograd, modules and optimizers."""

from __future__ import annotations

from weft.torch_private.entry import PrivateNames

AUTOGRAD = (
    PrivateNames(
        "torch._C",
        ("_current_graph_task_id", "_current_autograd_node", "_will_engine_execute_node"),
        "which backward runs on this thread, at which node, and whether it comes to another one",
        ("autograd/backward.py",),
    ),
    PrivateNames(
        "torch.autograd.Variable",
        ("_execution_engine",),
        "the end of a backward (queue_callback), and a backward whose gradients nobody keeps (run_backward)",
        ("autograd/backward.py",),
    ),
    PrivateNames(
        "torch.autograd.graph.Node",
        ("_sequence_nr", "_set_sequence_nr"),
        "in which order the engine comes to nodes that are ready",
        ("autograd/backward.py",),
        on_instances=True,
    ),
    PrivateNames(
        "torch.autograd",
        ("_unsafe_preserve_version_counter",),
        "writing to a tensor that autograd has saved and will see again as it was",
        ("autograd/backward.py",),
    ),
    PrivateNames(
        "torch._C._autograd",
        ("_unsafe_set_version_counter",),
        "the same, where the write is over",
        ("autograd/backward.py",),
    ),
    PrivateNames(
        "torch.autograd",
        ("_profiler_enabled",),
        "naming a distributed backward in a profile, and taking the path that profiles know",
        ("dist_autograd/api.py", "dist_autograd/quick_steps.py", "dist_autograd/run.py"),
    ),
    PrivateNames(
        "torch.autograd.Function",
        ("_backward_cls",),
        "telling the nodes of weft's own functions in a graph, and how they are called there",
        ("dist_autograd/cuts.py",),
    ),
)

TENSORS = (
    PrivateNames(
        "torch.Tensor",
        ("_backward_hooks", "_post_accumulate_grad_hooks"),
        "hooks of the user's on a parameter: they move to what takes its place, or weft runs them",
        (
            "autograd/backward.py",
            "data_parallel/arrivals.py",
            "fsdp/param.py",
            "fsdp/reduce.py",
            "tensor_parallel/gradients.py",
            "tensor_parallel/parameters.py",
        ),
    ),
    PrivateNames(
        "torch.Tensor",
        ("_version",),
        "whether somebody has written to a tensor since it was looked at",
        ("fsdp/param_group.py", "fsdp/state_dict.py", "tensor_parallel/initial.py"),
    ),
    PrivateNames(
        "torch.Tensor",
        ("_base", "_is_view"),
        "whether a tensor is a view of another, and of which",
        (
            "dist_autograd/context.py",
            "dist_autograd/landing.py",
            "fsdp/state.py",
            "tensor_parallel/crossing.py",
        ),
    ),
    PrivateNames(
        "torch.Tensor",
        ("_use_count",),
        "whether anybody else holds a tensor, so that its memory can be used again",
        ("tensors/flat.py",),
    ),
    PrivateNames(
        "torch._C",
        ("_storage_Use_Count",),
        "how many tensors share a tensor's memory",
        ("tensors/flat.py",),
    ),
    PrivateNames("torch.UntypedStorage", ("_cdata",), "the same: its argument", ("tensors/flat.py",)),
    PrivateNames(
        "torch.Tensor",
        ("_indices", "_values", "_nnz"),
        "the parts of a sparse tensor without coalescing it",
        (
            "comm/sparse.py",
            "comm_hooks/in_order.py",
            "data_parallel/buckets.py",
            "dist_autograd/landing.py",
            "dist_autograd/quick_steps.py",
            "local/sparse.py",
            "rpc/sparse.py",
        ),
    ),
    PrivateNames(
        "torch.nn.Parameter",
        ("_is_param",),
        "making a parameter of a DTensor without asking DTensor's dispatcher, which threads can't share",
        ("tensors/dtensor.py",),
        is_convention=True,
    ),
    PrivateNames(
        "torch",
        ("_foreach_copy_", "_foreach_add_", "_foreach_div_", "_foreach_mul_", "_foreach_norm"),
        "one call for many tensors",
        ("tensors/flat.py", "fsdp/reduce.py", "optimizers/clip.py", "dist_autograd/quick_steps.py"),
    ),
    PrivateNames(
        "torch",
        ("_fused_adam_", "_fused_adamw_"),
        "one call for a step of Adam over many parameters",
        ("dist_autograd/quick_steps.py",),
    ),
    PrivateNames(
        "torch._C._nn",
        ("flatten_dense_tensors",),
        "one flat tensor of many, in one call",
        ("comm/spread_packing.py",),
    ),
    PrivateNames("torch._utils", ("_flatten_dense_tensors",), "the same", ("optimizers/clip.py",)),
    PrivateNames(
        "torch._utils",
        ("_rebuild_parameter", "_rebuild_parameter_with_state"),
        "what a pickled parameter calls, known when an RPC message is read",
        ("rpc/fenced_unpickler.py",),
    ),
    PrivateNames(
        "torch",
        ("_assert_async",),
        "an embedding's check of ids that does not wait for the GPU",
        ("tensor_parallel/ids.py",),
    ),
    PrivateNames(
        "torch.ops.aten",
        ("_unsafe_view",),
        "an output that shares memory with an input, and autograd is not to know it",
        ("tensor_parallel/crossing.py",),
    ),
)

MODULES = (
    PrivateNames(
        "torch.nn.Module",
        ("_call_impl",),
        "what a module's call does: a class of its own for a module whose hooks a compiler shall see",
        ("modules/attached.py",),
    ),
    PrivateNames(
        "torch.nn.Module",
        ("_non_persistent_buffers_set",),
        "buffers that no checkpoint fills, which to_empty leaves without values",
        ("fsdp/state_dict.py",),
        on_instances=True,
    ),
    PrivateNames(
        "torch.nn.Module",
        ("_modules", "_parameters", "_buffers"),
        "what is registered in a module, past properties and __getattr__, and putting other tensors there",
        (
            "data_parallel/mixed_precision.py",
            "data_parallel/parameters.py",
            "data_parallel/replica.py",
            "fsdp/api.py",
            "fsdp/module.py",
            "fsdp/param.py",
            "fsdp/state_dict.py",
            "rpc/remote_module_owner.py",
            "tensor_parallel/initial.py",
        ),
        on_instances=True,
    ),
    PrivateNames(
        "torch.nn.Module",
        ("_compiled_call_impl",),
        "whether a module is compiled already",
        ("modules/attached.py",),
    ),
    PrivateNames(
        "torch.nn.modules.batchnorm",
        ("_BatchNorm",),
        "batch norms of every kind, which sequence parallel refuses",
        ("tensor_parallel/styles.py",),
    ),
    PrivateNames(
        "torch.nn.modules._functions",
        ("SyncBatchNorm",),
        "SyncBatchNorm's autograd function, whose collectives Join tells from others",
        ("join/watch.py",),
    ),
    PrivateNames(
        "torch.nn.modules.module",
        ("_IncompatibleKeys",),
        "what load_state_dict of a RemoteModule returns",
        ("rpc/remote_module_methods.py",),
    ),
    PrivateNames(
        "torch._C._nn",
        ("_parse_to",),
        "the forms of Module.to, for a RemoteModule",
        ("rpc/remote_module_methods.py",),
    ),
    PrivateNames(
        "torch.nn.MultiheadAttention",
        ("_reset_parameters",),
        "drawing parameters anew where a module has no reset_parameters",
        ("tensor_parallel/initial.py",),
    ),
    PrivateNames(
        "torch.nn.Module",
        ("_ddp_params_and_buffers_to_ignore",),
        "parameters and buffers that data parallelism leaves alone; users set it",
        ("data_parallel/ddp.py", "data_parallel/replicate.py"),
        is_convention=True,
    ),
    PrivateNames(
        "torch.Tensor",
        ("_ddp_ignored",),
        "the same as a mark on each parameter and buffer",
        ("data_parallel/ddp.py",),
        is_convention=True,
    ),
    PrivateNames(
        "torch.nn.Module",
        ("_orig_mod",),
        "the module inside one that torch.compile has made",
        ("compiler/explain.py",),
        is_convention=True,
    ),
)

OPTIMIZERS = (
    PrivateNames(
        "torch.optim.Optimizer",
        ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        "whether a step of an optimizer does more than the step",
        ("dist_autograd/quick_steps.py",),
        on_instances=True,
    ),
    PrivateNames(
        "torch.optim.optimizer",
        ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
        "the same for hooks of all optimizers",
        ("dist_autograd/quick_steps.py",),
    ),
    PrivateNames(
        "torch.optim.Adam",
        ("_init_group",),
        "the state that a step of Adam needs, made where it is missing",
        ("dist_autograd/quick_steps.py",),
    ),
    PrivateNames(
        "torch.Tensor",
        ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs", "_steps_in_backward"),
        "optimizers that step in backward: checkpoints and users find them by these names on a parameter",
        (
            "optimizers/in_backward.py",
            "comm_hooks/optimizer_overlap_hooks.py",
            "data_parallel/arrivals.py",
        ),
        is_convention=True,
    ),
)
