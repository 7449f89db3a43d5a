"""A cache on disk of the target's states on training texts, for all heads and runs that read the same texts."""

import hashlib
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.files import write
from foretoken.core.shapes import Bool, Float, Int
from foretoken.models.causal_lm import CausalLM
from foretoken.models.identity import fingerprint


class StateCache:
    """Files folder/TARGET/LAYER/TEXT.safetensors, each with one layer's states [t, d] on one text.

    The states are in the target's dtype. TARGET is a hash of the target, with its dtype; TEXT is a hash of the text's
    ids. So the states are found for any head and in any order of the data.
    """

    def __init__(self, folder: Path, lm: CausalLM) -> None:
        """Open the cache at `folder`, which need not exist; lm: the target."""
        self.lm = lm
        self.folder = folder / f"{fingerprint(lm)}-{str(lm.dtype).removeprefix('torch.')}"

    def check_room(self, tokens: int, layers: tuple[int, ...]) -> int:
        """Return the size in bytes that states would take if none were in the cache yet.

        tokens: number of tokens.
        layers: the layers whose states are kept; one that occurs twice counts once.

        Raises ForetokenError where the disk has less room.
        """
        wanted = tokens * len(set(layers)) * self.lm.hidden_size * self.lm.dtype.itemsize
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if wanted > free:
            raise ForetokenError(
                f"The cache {self.folder.parent} may take {wanted / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: "
                "train on fewer --tokens, or leave --cache out."
            )
        return wanted

    def __call__(
        self, ids: Int[Tensor, "b t"], mask: Bool[Tensor, "b t"], layers: tuple[int, ...]
    ) -> Float[Tensor, "b t f"]:
        """Return the target's states on texts, as `CausalLM.states` does, but zeros after a text's last learnt token.

        Texts that are not in the cache are put there, all by one forward.

        ids: b texts, padded on the right to t tokens [b, t].
        mask: which tokens are learnt, at least one per text [b, t].
        layers: the layers whose states stand side by side in the result [b, t, f], see models/features.py.
        """
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
        """Write the states of one whole text, which may come from its generation, into the cache.

        ids: the text [t].
        layers: the layers of the states.
        states: their states side by side [t, f].
        """
        name = _digest(ids)
        for layer, of_layer in zip(layers, states.chunk(len(layers), -1), strict=True):
            path, values = self._path(layer, name), {"states": of_layer.to(self.lm.dtype).cpu().contiguous()}
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, lambda temporary, values=values: temporary.write_bytes(save(values)))

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
