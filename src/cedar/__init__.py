"""cedar: Causal Encoder-Decoder with Attention Reuse.

The public names; everything is loaded on first use, so `import cedar` never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cedar.config.layer_plan import LayerPlan
    from cedar.config.model_config import ModelConfig
    from cedar.engine.loading import load

__version__ = "0.1.0"
__all__ = ["LayerPlan", "ModelConfig", "__version__", "load"]

_WHERE = {
    "LayerPlan": "cedar.config.layer_plan",
    "ModelConfig": "cedar.config.model_config",
    "load": "cedar.engine.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'cedar' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
