"""Identify what a measurement was made with: which weights, on which machine."""

import hashlib
import json
import platform
from pathlib import Path

import torch
import transformers
from torch import nn

from foretoken.models.causal_lm import CausalLM
from foretoken.models.panels import PackedEmbedding, PanelLinear
from foretoken.version import __version__

SAMPLES = 64  # about as many values of every tensor enter a fingerprint
# Entries of a configuration that do not enter a fingerprint: the model is the same without them.
PASSING = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def fingerprint(lm: CausalLM) -> str:
    """Return 16 hexadecimal digits made of the configuration and the weights of `lm`, packed ones included.

    How weights are stored depends on how the model is executed, and so do the digits: compare `host` first.
    """
    config = {key: value for key, value in lm.weights.config.to_diff_dict().items() if key not in PASSING}
    as_kept = json.loads(json.dumps(config, default=str))  # with texts as keys, as in a file
    return fingerprint_of_weights(lm.weights, json.dumps(as_kept, sort_keys=True))


def fingerprint_of_weights(module: nn.Module, about: str) -> str:
    """Return 16 hexadecimal digits made of `about`, and of the shape and some values of every weight of `module`."""
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
    """Return what the time of a forward depends on apart from the weights of `lm`: processor, device, dtype, etc."""
    return {
        "processor": cpu_name(),
        "device": device_name(lm.device),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "execution": lm.execution,
        "threads": str(torch.get_num_threads()),
    }


def versions() -> dict[str, str]:
    """Return the versions of foretoken, torch and transformers."""
    return {"foretoken": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def device_name(device: torch.device) -> str:
    """Return the name of the GPU where `device` is one, else the type of the device, such as cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cpu_name() -> str:
    """Return the name of this machine's processor; where the system does not tell it, its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
