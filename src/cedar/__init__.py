"""cedar: Causal Encoder-Decoder with Attention Reuse.

The public names; everything is loaded on first use, so `import cedar` never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cedar.config.layer_plan import LayerPlan
    from cedar.config.model_config import ModelConfig
    from cedar.engine.sampling_params import SamplingParams
    from cedar.llm import LLM
    from cedar.loading import load

__version__ = "0.1.0"
__all__ = ["LLM", "LayerPlan", "ModelConfig", "SamplingParams", "__version__", "load"]

_WHERE = {
    "LLM": "cedar.llm",
    "LayerPlan": "cedar.config.layer_plan",
    "ModelConfig": "cedar.config.model_config",
    "SamplingParams": "cedar.engine.sampling_params",
    "load": "cedar.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'cedar' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
