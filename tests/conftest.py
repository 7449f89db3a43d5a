"""Under pytest every function of the package checks the types and the shapes it declares."""

from jaxtyping import install_import_hook

install_import_hook("foretoken", "beartype.beartype")
