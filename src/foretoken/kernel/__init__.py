"""Forwards of language models and of draft heads on a CPU, in machine code: arrays in, arrays out, without torch.

A drafted tree has few nodes, so that a forward multiplies few rows with large matrices. Such a product takes the time
in which memory brings the weights, if nothing else is in the way. Here a weight is read once for a handful of rows,
what is used next is fetched into the cache meanwhile, and a whole forward, or a whole drafted chain, is one compiled
call. numba compiles it on first use, and compile.py keeps the machine code on disk.

**A panel** is 64 columns of a matrix, for all of its k inputs, in one stretch of memory. Panels stand one behind the
other, and matrices in the order in which a forward uses them (memory.py).

         the matrix [k, out] of a linear layer            a tile of 3 rows x 64 columns

              64 columns   64 columns                     x [rows, k]     16 columns  16  16  16
             +-----------+-----------+---                 +-----------+   +---------+---+---+---+
       k = 0 | 64 words  |           |            row 0   | x00 x01 ..|   | 16 sums |   |   |   |
       k = 1 | 64 words  |           |            row 1   | x10 x11 ..|   |         |   |   |   |
        ...  |    |      |           |            row 2   | x20 x21 ..|   |         |   |   |   |
             |    v      |           |                    +-----------+   +---------+---+---+---+
             +-----------+-----------+---                                  stay in vector registers
               panel 0     panel 1

A word has 32 bits: one float32 weight (WHOLE), or the bfloat16 weights of an even and an odd k (HALVED, DOTTED).
Quantised weights of GGUF files have forms of their own: their panels hold codes of 4 to 8 bits beside scales
(quantised.py), and are multiplied with rows that are quantised to 8 bits (dots.py).

**A tile** is some rows times some columns of a panel, whose sums stay in vector registers. It takes one word of each
column after the other, multiplies it with x[row, k] of every row, and adds to the sums (tile.py). Five to ten rows, by
the form of the weights, are one tile; more rows are several tiles per panel, and a panel that does not fit the cache is
used in chunks of its words, each for all rows. Where the processor has a matrix unit (AMX), up to 32 rows of a model in
bfloat16 are one tile (matrix_unit.py). While a tile computes, it fetches what is used next into the cache (product.py).
Every sum runs over k in the same order, however many rows there are. So a node's logits do not depend on the nodes
beside it, and a drafted chain gives bit for bit what plain decoding gives.

**A layer** is six steps, each shared out to the threads by panels or by heads (layer.py), and two more in models with
norms before the residual sums, as Gemma 3 has them:

    x ---- norm ---> project ---> cache ---> look ---> mix --- + ---- norm ---> widen ---> narrow --- + ---> x
       |             q | k | v     |          |         out    |            gate | up      down       |
       +-------------------------- | -------- | -------------- + ------------------------------------ +
                                   |          +-- rotary embedding of queries; attention (attention.py)
                                   +-- rotary embedding of keys; keys and values into their slots

Some layers of LFM2 have a short convolution in place of attention, and take the steps `cache` and `look` from
convolution.py. In a layer with experts, widen and narrow are those of experts.py: each node is multiplied with the
matrices of the few experts that it chooses, and the nodes that have an expert in common together.

**A call** from outside takes named tuples, whose docstrings say what every array means and how large it is:

    model.score        logits, or probabilities, after n nodes of each sequence of a batch
    chain.draft_chain  a chain of draft tokens: forward, softmax and draw, level after level
    heads.step, heads.parallel, model.scores       the parts of a draft head, level by level
    softmax.softmax, draws.*, product.times        what torch code outside of this package uses alone

To add an architecture whose layers compute what Llama's do, name its matrices and norms in models/decoder_layer.py, if
its modules have other names. If its layers differ, they need a step of their own in layer.py, or a file as
convolution.py is.

Threads are used where the work is worth starting them. An argument `threads` is None for one thread, not 1: None is a
type of its own, for which numba leaves out the code for threads.
"""
