"""Register our expert kernels in transformers: importing this module is the one line that a program needs.

    from engine.transformers_experts import NAME

    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation=NAME)

`NAME` is "moe-compress". `model.set_experts_implementation(NAME)` works too.
"""

from engine.adapted.experts_implementation import NAME, register

__all__ = ["NAME", "register"]

register()
