"""Language models that score token trees: loading, packed weights, slot caches, and the ways a forward is run.

**While a text is decoded** a step goes through a few files:

    target.py           the target's session: reads what its rows lack, then scores the trees
      rows.py           the rows of a batch: committed text and token tree of each; fused_rows.py where the kernel also
        |               draws and makes probabilities, recurrent.py for models that keep a recurrent state
        |-- growing_tree.py     which nodes a forward scores, where they are written, and what they see
        |-- cache.py            the keys and values of all rows, slot by slot; features.py: the hidden states
        +-- one of three, the backend of causal_lm.py, each called with token ids, positions, masks and the cache:
              llama_kernel.py   our kernel, over kernel_layers.py
              modules.py        transformers' own modules
              static.py         the same in fixed shapes, compiled by torch or recorded on a GPU (graphs.py)

text.py and grammar.py stand at both ends: prompts to ids, ids to text, and what a text may be.

**When a model is loaded,** named.py and folder.py check what was named, without torch. load.py reads it: GGUF files by
packed.py, what is quantised here by quantised.py, checkpoints by transformers or, from the second start on, by
kept_model.py: skeleton.py has a model's modules without their code, and mapped.py gives memory back. panels.py lays
linear layers out as the kernel reads them; decoder_layer.py, experts.py and rotary.py say what a layer is made of.
layout.py finds out what a model keeps per token, and probe.py refuses one that cannot score trees. parts.py lends a
target's embedding and LM head to draft heads, and identity.py names weights and machines in measurements.
"""
