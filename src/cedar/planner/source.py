"""From a MODEL argument to what is planned: a preset, a directory, a config.json, with or without
safetensors headers. Reads configs and headers only; never weights, never the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cedar.config import ModelConfig, preset, preset_names
from cedar.config.weight_schema import weight_schema
from cedar.errors import CheckpointError, UsageError
from cedar.formats.headers import TensorHeader, read_file_headers, read_headers
from cedar.planner.residency import CLASSES
from cedar.planner.weights import WeightClass, weight_class


@dataclass(frozen=True)
class PlannedModel:
    """What is planned.

    Attributes:
        name: as it was asked for.
        config: the model.
        measured: bytes by residency class from headers; None without headers.
        tensors: tensors in the headers; None without.
        unknown: tensors in the headers that the config does not ask for (counted as resident).
        missing: tensors the config asks for that no header holds.
        differing: tensors stored in another dtype or shape than the config asks for, and how.
    """

    name: str
    config: ModelConfig
    measured: dict[WeightClass, int] | None = None
    tensors: int | None = None
    unknown: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()


def resolve_model(argument: str) -> PlannedModel:
    """Find the model behind a MODEL argument.

    Raises:
        UsageError: unknown preset, or nothing of that name; the message lists what is allowed.
        ConfigError: the config is invalid.   CheckpointError: a header is damaged.
    """
    if argument.startswith("preset:"):
        return PlannedModel(argument, preset(argument.removeprefix("preset:")))
    path = Path(argument)
    if argument == "nano" and not path.is_dir():
        path = Path(__file__).parent.parent / "assets" / "nano"
        if not path.is_dir():  # a source tree whose model has not been built: the same shapes
            return PlannedModel(argument, preset("nano"))
    if not argument or not path.exists():
        raise UsageError(
            f"no model {argument!r}: neither a path nor a name; allowed: nano, a model directory, "
            f"a config.json, or preset:NAME with NAME one of {', '.join(preset_names())}"
        )
    config = ModelConfig.from_pretrained(path)
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return PlannedModel(argument, config)
    return _with_headers(argument, config, _headers(path))


def _headers(path: Path) -> dict[str, TensorHeader]:
    if (path / "model.safetensors.index.json").is_file() or (path / "model.safetensors").is_file():
        return read_headers(path, headers_only=True)
    found: dict[str, TensorHeader] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, header in read_file_headers(file, headers_only=True).items():
            if name in found:
                raise CheckpointError(f"{name} is in {found[name].file.name} and in {file.name}")
            found[name] = header
    return found


def _with_headers(name: str, config: ModelConfig, headers: dict[str, TensorHeader]) -> PlannedModel:
    schema = {tensor.name: tensor for tensor in weight_schema(config)}
    parts = {tensor.name: weight_class(tensor.part) for tensor in schema.values()}
    sums: dict[WeightClass, int] = dict.fromkeys(CLASSES, 0)
    for header in headers.values():
        sums[parts.get(header.name, "resident")] += header.nbytes
    return PlannedModel(
        name,
        config,
        measured=sums,
        tensors=len(headers),
        unknown=tuple(sorted(headers.keys() - parts.keys())),
        missing=tuple(sorted(parts.keys() - headers.keys())),
        differing=tuple(
            f"{key} is {headers[key].tag} {list(headers[key].shape)}, expected {schema[key].tag} "
            f"{list(schema[key].shape)}"
            for key in sorted(schema.keys() & headers.keys())
            if (headers[key].tag, headers[key].shape) != (schema[key].tag, schema[key].shape)
        ),
    )
