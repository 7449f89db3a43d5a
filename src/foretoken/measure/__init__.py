"""The parts that all measurements share: `foretoken bench`, `foretoken tune` and the scripts of benchmarks/.

harness          -> the one loop: methods in turn on every block, warmed up, in an order that rotates
results, report  -> files from which a stopped measurement goes on; tables as text, Markdown and JSON
plot             -> figures
clocks, machine  -> stopwatches around models and drafters; a description of the machine
memory           -> the growth of memory while a text grows
methods, pair    -> ways of generating, each from prompts to one Run: our engine, and transformers' generate
comparison       -> those side by side: `foretoken bench`
continuations    -> engines side by side on whole texts: `foretoken tune`
teacher_forcing, child_acceptance -> how good drafts would be, from the scores of both models along a given text
"""
