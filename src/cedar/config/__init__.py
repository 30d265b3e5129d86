"""What a model is: config fields, layer plan, presets, weight schema. Imports no torch."""

from cedar.config.layer_plan import LayerPlan, LayerSpec
from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset, preset_names

__all__ = ["LayerPlan", "LayerSpec", "ModelConfig", "preset", "preset_names"]
