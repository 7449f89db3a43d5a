"""The compiled loops of a CPU: arrays in, arrays out. Nothing here imports torch or another room."""
