"""Models that transformers runs: encoder-decoders, classifiers and families without a row, opened and validated here.

Start with `transformers_model.py`, which builds and checks any of them. `experts_implementation.py` is independent of them:
it gives our expert kernels to any model of transformers. Families without a row in engine/families are calibrated,
evaluated and pruned through transformers: `interface_families.py` lists them, `known_models.py` refuses what cannot be
built, `expert_layers.py` finds their MoE layers, `adapted_checkpoint.py` opens their files with the numbers of
`adapted_config.py` and the names of `stored_names.py`, `adapted_block.py` is the router and the experts of a layer,
`adapted_pass.py` runs text through one layer after the other, `adapted_gradients.py` goes back through them, and
`adapted_decoder.py` holds a whole model that generates. `subset_router.py` asks a router about some of the experts.
`stored_experts.py` takes experts and their hidden units out of the files, `stack_of.py` finds how files hold projections,
and `config_keys.py` which entries of config.json say how many experts there are and how wide they are. `image_reader.py` is
the processor of an image-and-text model, and `image_sequence.py` one sequence whose prompt has images. `layer_sizes.py` has
the entries for layers with different numbers of experts, or widths of them. `low_bit_weights.py` reads and multiplies
low-bit weights, and `low_bit_layers.py` says which weights may be low-bit.
"""
