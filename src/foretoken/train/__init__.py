"""The training of draft heads: texts, the target's states on them, losses, the loop, and the finished folder."""
