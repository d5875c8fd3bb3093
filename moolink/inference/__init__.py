"""Remote inference: actors without a model call servers that batch their requests."""

from moolink.inference.client import InferenceClient, InferenceRequest
from moolink.inference.server import InferenceBatch, InferenceServer

__all__ = ["InferenceBatch", "InferenceClient", "InferenceRequest", "InferenceServer"]
