"""What everything that is measured stands on: `foretoken bench`, `foretoken tune` and the scripts of benchmarks/.

harness          -> the one loop: methods in turn on every block, warm, in an order that rotates
results, report  -> files that a stopped measurement goes on from; tables as text, Markdown and JSON
plot             -> figures
clocks, machine  -> stopwatches around models and drafters; where a figure was taken
methods, pair    -> one way of generating, prompts in, one Run out: our engine, and transformers' generate
comparison       -> those side by side: `foretoken bench`
continuations    -> engines side by side on whole texts: `foretoken tune`
forwards         -> milliseconds of one forward
teacher_forcing, child_acceptance -> what a text says of a drafter without decoding it
"""
