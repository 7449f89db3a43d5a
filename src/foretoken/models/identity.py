"""What a measurement was made for: which weights, on which machine."""

import hashlib
import platform
from pathlib import Path

import torch
import transformers
from torch import nn

from foretoken.models.causal_lm import CausalLM
from foretoken.models.panels import PackedEmbedding, PanelLinear
from foretoken.version import __version__

SAMPLES = 64  # values of every tensor
PASSING = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")  # entries that make no other model


def fingerprint(lm: CausalLM) -> str:
    """16 hexadecimal digits: of the configuration and of the weights, packed ones included.

    Which weights there are depends on how a model is executed: compare `host` first.
    """
    config = {key: value for key, value in lm.model.config.to_diff_dict().items() if key not in PASSING}
    return fingerprint_of_weights(lm.model, repr(sorted(config.items(), key=str)))


def fingerprint_of_weights(module: nn.Module, about: str) -> str:
    """16 hexadecimal digits: of `about`, and of shape and evenly spaced values of every weight."""
    digest = hashlib.sha256(about.encode())
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, part in module.named_modules():
        if isinstance(part, PanelLinear):
            tensors[f"{name}.panels"] = part.panels
        elif isinstance(part, PackedEmbedding):
            tensors[f"{name}.raw"] = torch.from_numpy(part.raw)
    for name in sorted(tensors):
        values = tensors[name].detach().flatten()
        chosen = values[:: max(1, len(values) // SAMPLES)]
        digest.update(f"{name} {tuple(tensors[name].shape)}".encode() + chosen.cpu().double().numpy().tobytes())
    return digest.hexdigest()[:16]


def host(lm: CausalLM) -> dict[str, str]:
    """What the cost of a forward depends on, apart from the model."""
    return {
        "processor": cpu_name(),
        "device": device_name(lm.device),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "execution": lm.execution,
        "threads": str(torch.get_num_threads()),
    }


def versions() -> dict[str, str]:
    return {"foretoken": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
