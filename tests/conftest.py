"""Under pytest every function of the package checks the types and the shapes it declares."""

import torch
from jaxtyping import install_import_hook

install_import_hook("foretoken", "beartype.beartype")
torch.set_num_threads(1)  # the models of the tests are tiny: waking a second thread costs more than their work
