"""Decoders of families without a row in engine/families: opened, calibrated, pruned and run through transformers.

Start with `adapted_checkpoint.py`, which opens their files with the numbers of `adapted_config.py` and the names of
`stored_names.py`. `interface_families.py` lists the families, `known_models.py` refuses what cannot be built, and
`expert_layers.py` finds the MoE layers. `adapted_block.py` is the router and the experts of a layer, `adapted_pass.py`
runs text through one layer after the other, `adapted_gradients.py` goes back through them, and `adapted_decoder.py`
holds a whole model that generates. `subset_router.py` asks a router about some of the experts.

`stored_experts.py` takes experts and their hidden units out of the files, `stack_of.py` finds how files hold
projections, and `config_keys.py` which entries of config.json say how many experts there are and how wide they are.
`layer_sizes.py` has the entries for layers with different numbers of experts, or widths of them. `low_bit_weights.py`
reads and multiplies low-bit weights, and `low_bit_layers.py` says which weights may be low-bit.

`experts_implementation.py` is independent of all this: it gives our expert kernels to any model of transformers.
"""
