"""`foretoken bench`: our decoding and transformers' own `generate` on the same prompts, interleaved in one process.

pair       -> the models, two copies of each: ours may be packed, transformers' is as it was loaded
methods    -> one way of generating: prompts in, one Run out
rounds     -> every method once on the same prompt, in rotated order, again and again; one line of JSONL each
summary    -> medians of the runs, and medians of ratios taken inside a round
report, plot

`foretoken bench execution`: what one forward costs, by each way of running it.

forwards   -> the ways, and the places (nodes, context, batch) at which they are compared
execution  -> clock, turns in rotated order, medians
execution_report
"""
