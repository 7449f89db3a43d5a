"""Quantised weights in compiled calls: embeddings as they are looked up."""

# pyright: reportCallIssue=false

from foretoken.kernel.addresses import floats, octets
from foretoken.kernel.compile import linked
from foretoken.kernel.quantised import BLOCK_BYTES, QUANTISED, WEIGHTS, unpack_rows


@linked("foretoken_unpack", 4)
def unpack_row(raw, row_bytes, form, x):
    """Write the weights of one row as a GGUF file stores it. raw, x: addresses of the row and of float32 numbers."""
    kind = form - QUANTISED
    k = row_bytes // BLOCK_BYTES[kind] * WEIGHTS[kind]
    unpack_rows(octets(raw, (1, row_bytes)), form, floats(x, (1, k)))
