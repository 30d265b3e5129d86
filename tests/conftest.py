"""Fixtures of every test: one kernel backend at a time, recorded vectors, models loaded once.

`backend` runs each test that asks for it on the reference operators and on every other backend that
works on this machine. Models are cached for the session, so they must not be changed; states are
made by each test.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from exact_operators import exact_model, with_weights
from hypothesis import settings
from safetensors.torch import load_file
from torch import Tensor

import cedar
from cedar.cache.cached_rows import CachedRows
from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset
from cedar.engine.loaded_model import LoadedModel
from cedar.errors import CedarError
from cedar.kernels.backends import select_operators
from cedar.kernels.operators import Operators

torch.set_num_threads(1)

# The machine is shared and slow at times: correctness is tested here, not speed. Examples are the
# same in every run, so that a red run can be repeated.
settings.register_profile("cedar", deadline=None, derandomize=True)
settings.load_profile("cedar")

VECTORS = Path(__file__).parent / "vectors"

ModelLoader = Callable[..., LoadedModel]
RowsWatcher = Callable[[LoadedModel], AbstractContextManager[list[CachedRows]]]


def _problem(name: str) -> str | None:
    """Why a backend cannot be used here; None if it can."""
    try:
        select_operators(name)
    except (CedarError, OSError, AttributeError) as error:
        return str(error)
    return None


PROBLEMS = {name: _problem(name) for name in ("native",)}
BACKENDS = ["reference", *(name for name, problem in PROBLEMS.items() if problem is None)]


def pytest_report_header() -> list[str]:
    """Say which backends are tested, and why another is not."""
    left_out = [f"{name} left out: {problem}" for name, problem in PROBLEMS.items() if problem]
    return [f"kernel backends: {', '.join(BACKENDS)}", *left_out]


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a kernel backend."""
    return str(request.param)


@pytest.fixture(scope="session")
def ops(backend: str) -> Operators:
    """The operators of a backend."""
    return select_operators(backend)


@pytest.fixture(scope="session")
def vectors() -> Path:
    """Directory of recorded vectors."""
    return VECTORS


@pytest.fixture(scope="session")
def kernel_vectors() -> dict[str, Tensor]:
    """Recorded single operations."""
    return load_file(VECTORS / "kernels.safetensors")


@cache
def _directory(model: str) -> Path:
    return next(path for path in VECTORS.glob(f"{model}-*") if path.is_dir())


@pytest.fixture(scope="session")
def model_directory() -> Callable[[str], Path]:
    """Short name of a recorded model, such as `m1`, to its directory."""
    return _directory


@pytest.fixture
def copy_of(tmp_path: Path, model_directory: Callable[[str], Path]) -> Callable[[str], Path]:
    """`copy_of(model)`: a recorded model in a directory of its own, without its recordings."""

    def copy(model: str) -> Path:
        target = tmp_path / model
        target.mkdir()
        for file in model_directory(model).iterdir():
            if not file.name.startswith("golden"):
                shutil.copy(file, target)
        return target

    return copy


@pytest.fixture(scope="session")
def recorded() -> Callable[[str, str], dict[str, Tensor]]:
    """`recorded(model, dtype)`: what the reference program computed, dtype float32 or bfloat16."""

    @cache
    def load(model: str, dtype: str) -> dict[str, Tensor]:
        name = "golden_f32" if dtype == "float32" else "golden"
        return load_file(_directory(model) / f"{name}.safetensors")

    return load


@cache
def _load(model: str, dtype: str, kernels: str, index_key_rule: str) -> LoadedModel:
    return cedar.load(
        _directory(model), kernels=kernels, dtype=dtype, index_key_rule=index_key_rule
    )


@pytest.fixture(scope="session")
def load_recorded(backend: str) -> ModelLoader:
    """`load_recorded(model, dtype, index_key_rule="corrected")`: a recorded model, on each backend."""

    def load(model: str, dtype: str, index_key_rule: str = "corrected") -> LoadedModel:
        return _load(model, dtype, backend, index_key_rule)

    return load


@cache
def _exact(config: ModelConfig, index_key_rule: str, seed: int) -> LoadedModel:
    return exact_model(config, index_key_rule=index_key_rule, seed=seed)


@pytest.fixture(scope="session")
def exact() -> ModelLoader:
    """`exact(preset name or config)`: random weights, sums rounded once (see exact_operators.py).

    Two ways of computing the same thing then agree to the last bit, on any machine.
    """

    def make(
        what: str | ModelConfig, *, index_key_rule: str = "corrected", seed: int = 0
    ) -> LoadedModel:
        config = preset(what) if isinstance(what, str) else what
        return _exact(config, index_key_rule, seed)

    return make


@pytest.fixture(scope="session")
def exact_recorded() -> Callable[[str], LoadedModel]:
    """`exact_recorded(model)`: the weights of a recorded model with exact sums, in float32."""

    @cache
    def make(model: str) -> LoadedModel:
        loaded = _load(model, "float32", "reference", "corrected")
        weights = dict(loaded.net.state_dict())
        return with_weights(loaded.config, weights, engram=loaded.forward.engram)

    return make


@pytest.fixture
def watch_rows(monkeypatch: pytest.MonkeyPatch) -> RowsWatcher:
    """`with watch_rows(model) as calls:` collects the row store of every call made inside.

    It shows what the calls selected, which nothing keeps longer than one call.
    """

    @contextmanager
    def watch(model: LoadedModel) -> Iterator[list[CachedRows]]:
        calls: list[CachedRows] = []
        original = model.forward.rows

        def rows(*args: object, **kwargs: object) -> CachedRows:
            calls.append(original(*args, **kwargs))  # type: ignore[arg-type]
            return calls[-1]

        with monkeypatch.context() as patch:
            patch.setattr(model.forward, "rows", rows)
            yield calls

    return watch
