"""Models are made one at a time: while transformers makes one, it changes classes of its own for all threads.

Two at once would leave them changed: `tie_weights` would do nothing from then on, so that weights would be lacking.
"""

import threading

making = threading.RLock()
