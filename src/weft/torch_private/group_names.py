"""Private names of torch that have to do with process groups, meshes and DTensor."""

from __future__ import annotations

from weft.torch_private.entry import PrivateNames

GROUPS = (
    PrivateNames(
        "torch.distributed.distributed_c10d",
        ("_world",),
        "the groups of this process: whose they are where ranks are threads, and which are open",
        ("comm/group.py", "comm_hooks/in_order.py", "join/patches.py", "launcher/world.py"),
    ),
    PrivateNames(
        "torch.distributed.distributed_c10d",
        ("_World",),
        "what the profiler records of the groups (pg_config_info), for ranks that are threads",
        ("launcher/world.py",),
    ),
    PrivateNames(
        "torch.distributed.distributed_c10d",
        ("_get_default_group", "_get_process_group_store"),
        "the default group, and the store that its members share",
        ("comm/group.py",),
    ),
    PrivateNames(
        "torch.distributed.distributed_c10d",
        ("_get_default_store",),
        "the store by which RPC workers meet",
        ("rpc/joining.py",),
    ),
    PrivateNames(
        "torch.distributed.distributed_c10d",
        ("_FR_SELF_RECORDING_BACKENDS",),
        "keeps the flight recorder away from groups that are written in Python, where it fails",
        ("first_use.py",),
        since="2.15",
        is_optional=True,
    ),
    PrivateNames(
        "torch._C._distributed_c10d",
        ("_set_thread_isolation_mode",),
        "a map of group names a thread, for ranks that are threads",
        ("launcher/world.py",),
    ),
    PrivateNames(
        "torch.distributed.ProcessGroup",
        ("_get_backend",),
        "the backend that a group has for a device; a group in Python answers for itself",
        ("comm/rows.py", "comm/traced.py", "local/labels.py"),
    ),
    PrivateNames(
        "torch.distributed.ProcessGroup",
        ("_set_group_name", "_set_group_desc", "_device_types"),
        "what c10d asks of every group, so also of one written in Python",
        ("local/labels.py",),
    ),
    PrivateNames(
        "torch.distributed._functional_collectives",
        (
            "all_gather_into_tensor_coalesced",
            "all_gather_tensor",
            "all_reduce",
            "all_reduce_coalesced",
            "all_to_all_single",
            "broadcast",
            "reduce_scatter_tensor",
            "reduce_scatter_tensor_coalesced",
            "wait_tensor",
        ),
        "collectives that a compiler can trace",
        ("comm/traced.py",),
    ),
    PrivateNames(
        "torch.distributed._functional_collectives",
        ("AsyncCollectiveTensor",),
        "a DTensor's local tensor that has not arrived yet",
        ("tensors/dtensor.py",),
    ),
    PrivateNames(
        "torch.ops",
        ("_c10d_functional",),
        "the same collectives as operations of a graph",
        ("comm/traced.py", "compiler/graphs.py"),
    ),
    PrivateNames(
        "torch._C",
        ("_are_functorch_transforms_active", "_DisableFuncTorch", "_dispatch_tls_is_dispatch_key_excluded"),
        "whether vmap, grad or jvp is around a collective, which none of them can see, and going around them",
        ("comm/transforms.py",),
    ),
    PrivateNames(
        "torch._C.DispatchKey", ("FuncTorchDynamicLayerFrontMode",), "the same", ("comm/transforms.py",)
    ),
    PrivateNames(
        "torch._C._functorch",
        (
            "is_legacy_batchedtensor",
            "is_functorch_wrapped_tensor",
            "get_unwrapped",
            "get_interpreter_stack",
            "TransformType",
        ),
        "which transforms these are, and the tensor that they have wrapped",
        ("comm/transforms.py",),
    ),
    PrivateNames(
        "torch.autograd.forward_ad",
        ("_current_level",),
        "whether forward-mode AD goes on",
        ("comm/transforms.py",),
    ),
    PrivateNames(
        "torch.distributed._local_tensor",
        ("enabled_local_tensor_mode",),
        "whether this process stands for several ranks",
        ("comm/simulated.py",),
    ),
    PrivateNames(
        "torch.nn.parallel.DistributedDataParallel",
        ("_active_ddp_module",),
        "whether torch's wrapper is around a module that weft holds",
        ("modules/nominal.py",),
    ),
    PrivateNames(
        "torch.distributed._composable.contract",
        ("STATE_KEY",),
        "the registry in which torch's tools look up what was applied to a module",
        ("modules/nominal.py",),
    ),
    PrivateNames(
        "torch._C",
        ("_len_torch_dispatch_stack", "_get_dispatch_stack_at"),
        "whether a dispatch mode is on that wants to see collectives",
        ("comm/fresh.py", "comm/simulated.py"),
    ),
    PrivateNames(
        "torch._C",
        ("_ensureCUDADeviceGuardSet",),
        "fake tensors on threads that end, where torch knows CUDA and finds no GPU",
        ("launcher/threads.py",),
        is_optional=True,
    ),
    PrivateNames(
        "torch._C",
        ("Future",),
        "telling a future of any kind: the public one is a class below it",
        ("data_parallel/buckets.py", "rpc/serving.py"),
    ),
    PrivateNames(
        "torch.futures.Future",
        ("_set_unwrap_func",),
        "a remote error that is raised anew for each who waits",
        ("rpc/calls.py",),
    ),
    PrivateNames(
        "torch._jit_internal",
        ("RRef",),
        "the annotation RRef[T], which TorchScript knows",
        ("rpc/torch_names.py",),
        is_optional=True,
    ),
    PrivateNames(
        "torch.distributed.rpc",
        ("_set_rpc_timeout", "_is_current_rpc_agent_set"),
        "programs that set torch's time limit of RPC, where they have loaded torch's RPC",
        ("rpc/torch_names.py",),
        is_optional=True,
    ),
    PrivateNames(
        "torch.distributed.rpc.api",
        ("_thread_local_var",),
        "programs that collect futures for torch's _wait_all, where they have loaded torch's RPC",
        ("rpc/torch_names.py",),
        is_optional=True,
    ),
)

MESHES = (
    PrivateNames(
        "torch.distributed.tensor.DTensor",
        ("_local_tensor", "_spec"),
        "a DTensor's shard and layout without a call that autograd or its dispatcher sees",
        ("fsdp", "optimizers", "planning/memory.py", "tensor_parallel", "tensors/dtensor.py"),
    ),
    PrivateNames(
        "torch.distributed.tensor._dtensor_spec",
        ("DTensorSpec", "TensorMeta"),
        "the layout that a DTensor is made of",
        (
            "data_parallel/members.py",
            "fsdp/placement.py",
            "tensor_parallel/gradients.py",
            "tensors/dtensor.py",
        ),
    ),
    PrivateNames(
        "torch.distributed.tensor.placement_types",
        ("_StridedShard",),
        "shards of a parameter that tensor parallelism has split along the same dim",
        ("fsdp/placement.py",),
    ),
    PrivateNames(
        "torch.distributed.device_mesh.DeviceMesh",
        ("_flatten", "_concatenate"),
        "several axes of a mesh as one axis, and as one mesh",
        ("fsdp/mesh.py",),
    ),
    PrivateNames(
        "torch.distributed.device_mesh",
        ("_mesh_resources",),
        "the mesh of the `with` statement around parallelize_module",
        ("tensor_parallel/api.py",),
    ),
    PrivateNames(
        "torch.distributed.tensor._sharding_prop",
        ("ShardingPropagator",),
        "its lock, which ranks that are threads share",
        ("launcher/world.py",),
    ),
    PrivateNames(
        "torch.distributed.tensor._sharding_prop.ShardingPropagator",
        ("_fake_mode_lock",),
        "one thread at a time infers shapes",
        ("launcher/world.py",),
        since="2.12",
        is_optional=True,
    ),
    PrivateNames(
        "torch.distributed.tensor.debug",
        ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"),
        "a world that ends leaves no findings of DTensor's behind",
        ("launcher/world.py",),
    ),
    PrivateNames(
        "torch.distributed.tensor._redistribute",
        ("_gen_transform_infos", "clear_redistribute_planner_cache"),
        "the same for plans of redistribution",
        ("launcher/world.py",),
    ),
)
