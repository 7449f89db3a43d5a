"""The target's states of training texts, kept on disk for every head and every run that reads the same texts."""

import hashlib
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.files import write
from foretoken.core.shapes import Bool, Float, Int
from foretoken.models.causal_lm import CausalLM
from foretoken.models.identity import fingerprint


class StateCache:
    """folder/TARGET/LAYER/TEXT.safetensors: one layer's states [t, d] of one text, in the target's dtype.

    TARGET and TEXT are hashes, of the target and of the text's ids: any head, any order of the data finds them.
    """

    def __init__(self, folder: Path, lm: CausalLM) -> None:
        self.lm = lm
        self.folder = folder / f"{fingerprint(lm)}-{str(lm.dtype).removeprefix('torch.')}"

    def num_bytes(self, tokens: int, layers: tuple[int, ...]) -> int:
        """What the states of so many tokens take."""
        return tokens * len(set(layers)) * self.lm.hidden_size * self.lm.dtype.itemsize

    def check_room(self, tokens: int, layers: tuple[int, ...]) -> None:
        """Raises ForetokenError where the disk has less than they will take, counting none as there already."""
        wanted = self.num_bytes(tokens, layers)
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if wanted > free:
            raise ForetokenError(
                f"The cache {self.folder.parent} may take {wanted / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: "
                "train on fewer --tokens, or leave --cache out."
            )

    def __call__(
        self, ids: Int[Tensor, "b t"], mask: Bool[Tensor, "b t"], layers: tuple[int, ...]
    ) -> Float[Tensor, "b t f"]:
        """As CausalLM.states; zeros behind a text's last learnt token. One forward for all texts not yet there."""
        unique = tuple(dict.fromkeys(layers))
        lengths = [int(row.nonzero()[-1]) + 1 for row in mask]
        names = [_digest(row[:length]) for row, length in zip(ids, lengths, strict=True)]
        missing = [i for i, name in enumerate(names) if not all(self._path(layer, name).exists() for layer in unique)]
        if missing:
            for i, of_text in zip(missing, self.lm.states(ids[missing], unique), strict=True):
                self.put(ids[i, : lengths[i]], unique, of_text[: lengths[i]])
        out = torch.zeros(*ids.shape, len(layers) * self.lm.hidden_size, dtype=self.lm.dtype, device=ids.device)
        for i, (name, length) in enumerate(zip(names, lengths, strict=True)):
            read = {layer: self._read(layer, name) for layer in unique}
            out[i, :length] = torch.cat([read[layer] for layer in layers], -1).to(ids.device)
        return out

    def put(self, ids: Int[Tensor, " t"], layers: tuple[int, ...], states: Float[Tensor, "t f"]) -> None:
        """Keep the states of one whole text, which came out of its generation, say: those of `layers` side by side."""
        name = _digest(ids)
        for layer, of_layer in zip(layers, states.chunk(len(layers), -1), strict=True):
            path, values = self._path(layer, name), {"states": of_layer.to(self.lm.dtype).cpu().contiguous()}
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, lambda temporary, values=values: save_file(values, temporary))

    def _read(self, layer: int, name: str) -> Float[Tensor, "t d"]:
        path = self._path(layer, name)
        try:
            return load_file(path)["states"]
        except (OSError, SafetensorError, KeyError) as error:
            raise ForetokenError(f"Cannot read {path} of the cache ({error}): remove it.") from error

    def _path(self, layer: int, name: str) -> Path:
        return self.folder / str(layer) / f"{name}.safetensors"


def _digest(ids: Int[Tensor, " t"]) -> str:
    return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()[:32]
