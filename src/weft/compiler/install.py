"""Where the pipeline is hooked into torch.compile: before Inductor traces autograd, and after its own passes.

Private names of torch, used here and nowhere else: Inductor's `config.pre_grad_custom_pass` and
`config.post_grad_custom_post_pass`.
"""

from __future__ import annotations


def install() -> None:
    """Run the pipeline over every graph that Inductor compiles from now on. Harmless when called again."""
    from torch._inductor import config

    from weft.compiler.inductor_passes import MarkPass, PipelinePass

    hooks = {"pre_grad_custom_pass": MarkPass, "post_grad_custom_post_pass": PipelinePass}
    for name, kind in hooks.items():
        users = getattr(config, name)
        if not isinstance(users, kind):
            setattr(config, name, kind(users))
